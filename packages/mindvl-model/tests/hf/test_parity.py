# SPDX-License-Identifier: Apache-2.0
"""The parity check passes for equal models and detects errors in one of them."""

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mindvl_model import MindVLConfig, ModelError, WeightError
from mindvl_model.families.registry import write_language
from mindvl_model.hf import parity
from mindvl_model.hf.config_json import hf_config
from mindvl_model.hf.export import export_hf_directory
from mindvl_model.hf.inputs import pack_for
from mindvl_model.hf.parity import check_parity, random_inputs
from mindvl_model.hf.processor_files import ProcessorSettings
from mindvl_model.testing.tiny import (
    save_qwen2_5_vl,
    smallest_config,
    smallest_deepseek_v3,
    smallest_qwen2_5_vl,
    smallest_qwen3_moe,
    smallest_qwen3_vl,
)
from mindvl_model.weights.names import published_name


@pytest.fixture
def qwen2_5_vl(tmp_path: Path) -> Path:
    save_qwen2_5_vl(smallest_qwen2_5_vl(), tmp_path / "qwen")
    return tmp_path / "qwen"


def test_parity_holds_for_qwen2_5_vl_in_fp32_with_a_large_margin(qwen2_5_vl: Path) -> None:
    progress: list[tuple[int, int]] = []
    report = check_parity(qwen2_5_vl, num_inputs=30, on_inputs=lambda done, total: progress.append((done, total)))
    assert [len(each) for each in report.by_kind().values()] == [6, 6, 6, 6, 6, 30]
    assert list(report.by_kind()) == ["text", "image", "images", "video", "mixed", "all"]
    assert report.failing == ()
    assert max(one.mre for one in report.inputs) <= 1e-5
    assert all(one.max_difference <= 1e-4 * one.max_logit for one in report.inputs)
    assert progress[-1] == (30, 30)


def test_bf16_errors_are_compared_with_rounding_errors(qwen2_5_vl: Path) -> None:
    report = check_parity(qwen2_5_vl, num_inputs=10, dtype="bf16")
    assert report.failing == ()
    for one in report.inputs:
        assert 1e-3 < one.rounding_mre < 0.03
        assert 1e-3 < one.mre <= 1.5 * one.rounding_mre
    worst = replace(report.inputs[0], mre=1.6 * report.inputs[0].rounding_mre)
    assert not worst.holds
    assert not replace(worst, rounding_mre=0.0, mre=0.0051, mae=0.0).holds
    assert replace(worst, rounding_mre=0.0, mre=0.005, mae=0.005).holds


def test_parity_holds_for_mindvl_and_for_a_language_model(
    make_model: Callable[..., Any], tokenizer_directory: Path, tmp_path: Path
) -> None:
    config = smallest_config(vocab_size=270)
    settings = ProcessorSettings(min_pixels=784, max_pixels=7840)
    export_hf_directory(
        make_model(config), config, tmp_path / "mindvl", tokenizer=tokenizer_directory, processor=settings
    )
    with pytest.raises(
        ModelError, match=r"the remote code of the directory \(configuration_mindvl.py, .*--trust-remote-code"
    ):
        check_parity(tmp_path / "mindvl", num_inputs=1)
    report = check_parity(tmp_path / "mindvl", num_inputs=10, trust_remote_code=True)
    assert (report.model_type, report.failing) == ("mindvl", ())
    assert {one.kind for one in report.inputs} == {"text", "image", "images", "video", "mixed"}

    text = hf_config(config, torch.float32)["text_config"]
    Qwen3ForCausalLM(Qwen3Config(**text)).save_pretrained(tmp_path / "qwen3")
    report = check_parity(tmp_path / "qwen3", num_inputs=5)
    assert (report.model_type, report.failing) == ("qwen3", ())
    assert {one.kind for one in report.inputs} == {"text"}
    assert max(one.mre for one in report.inputs) <= 1e-5


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_model_at_a_time_finds_the_same_errors(
    qwen2_5_vl: Path, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    both, progress = check_parity(qwen2_5_vl, num_inputs=6, dtype=dtype), []
    alive: list[weakref.ref[Any]] = []
    load = {name: getattr(parity, name) for name in ("_load_mindvl", "_load_transformers")}

    def alone(name: str) -> Any:
        def make(*arguments: Any) -> Any:
            assert not [one for one in alive if one() is not None]
            model = load[name](*arguments)
            alive.append(weakref.ref(model))
            return model

        return make

    for name in load:
        monkeypatch.setattr(parity, name, alone(name))
    gc.disable()  # what is let go must not wait for it
    try:
        turned = check_parity(
            qwen2_5_vl, num_inputs=6, dtype=dtype, one_at_a_time=True, on_inputs=lambda *each: progress.append(each)
        )
    finally:
        gc.enable()
    assert turned == both
    assert len(alive) == (2 if dtype == "fp32" else 3)
    assert progress[-1] == (6 * len(alive), 6 * len(alive))
    assert not list(tmp_path.glob("mindvl-parity-*"))


def test_parity_holds_with_one_expert_per_token(tmp_path: Path) -> None:
    """With normalization its weight is 1; megatron-core itself rejects such a configuration."""
    for normalize in (True, False):
        config = smallest_qwen3_moe(experts_per_token=1, normalize_router=normalize)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**write_language(config.language)))
        model.save_pretrained(tmp_path / str(normalize))
        report = check_parity(tmp_path / str(normalize), num_inputs=2)
        assert report.failing == ()
        assert max(one.mre for one in report.inputs) <= 1e-5


@pytest.mark.parametrize("config", [smallest_qwen3_moe(), smallest_deepseek_v3(num_mtp_layers=0)])
def test_parity_holds_for_language_models_with_experts_also_in_fp8(config: MindVLConfig, tmp_path: Path) -> None:
    published = AutoModelForCausalLM.from_config(AutoConfig.for_model(**write_language(config.language)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in published.parameters():
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    published.save_pretrained(tmp_path)
    report = check_parity(tmp_path, num_inputs=5)
    assert (report.model_type, report.failing) == (config.language.family, ())
    assert max(one.mre for one in report.inputs) <= 1e-5

    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.full((1, 1), 1.25)
    save_file(tensors, file, metadata={"format": "pt"})
    document = json.loads((tmp_path / "config.json").read_text())
    document["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(document))
    rounded = check_parity(tmp_path, num_inputs=5)
    assert rounded.failing == ()
    assert max(one.mre for one in rounded.inputs) <= 1e-5
    assert rounded.inputs[0].max_logit != report.inputs[0].max_logit


def test_parity_holds_for_a_language_model_without_output_layer(tmp_path: Path) -> None:
    """As models of text embeddings are saved: no prefix, and the output layer is the embedding."""
    config = smallest_config(tie_embeddings=True)
    published = AutoModelForCausalLM.from_config(AutoConfig.for_model(**write_language(config.language)))
    published.model.save_pretrained(tmp_path)
    assert "norm.weight" in load_file(tmp_path / "model.safetensors")
    report = check_parity(tmp_path, num_inputs=3)
    assert (report.failing, max(one.mre for one in report.inputs) <= 1e-5) == ((), True)


def test_a_directory_that_transformers_would_fill_at_random_is_refused(tmp_path: Path) -> None:
    """transformers reads the names of published Qwen2.5-VL directories for that model only."""
    save_qwen2_5_vl(smallest_qwen3_vl(), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({published_name(name): one for name, one in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"transformers finds no tensors for \d+ parameters, such as model\."):
        check_parity(tmp_path, num_inputs=1)


def test_an_error_in_the_vision_encoder_fails_every_input_with_images_or_videos(
    qwen2_5_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = parity._load_mindvl

    def wrong(*arguments: Any) -> Any:
        model = right(*arguments)
        model.vision.patch_embed.weight.data *= 1.2
        return model

    monkeypatch.setattr(parity, "_load_mindvl", wrong)
    report = check_parity(qwen2_5_vl, num_inputs=10)
    assert {one.number for one in report.failing} == {n for n in range(10) if n % 5}  # all but text
    assert all(one.images or one.videos for one in report.failing)


def test_parity_fails_for_nan_in_the_weights(qwen2_5_vl: Path) -> None:
    file = qwen2_5_vl / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    assert len(check_parity(qwen2_5_vl, num_inputs=5).failing) == 5


def test_errors_equal_values_computed_by_hand() -> None:
    class Model(torch.nn.Module):
        def logits(self, **_: Any) -> torch.Tensor:
            return torch.tensor([[1.0, -2.0], [3.0, 0.5]])

        def forward(self, **_: Any) -> Any:
            return type("Output", (), {"logits": torch.tensor([[[1.0, -1.0], [4.0, 0.0]]])})

    config = smallest_config()
    reference = Model()
    reference.model = torch.nn.Module()
    segment = random_inputs(config, 1, seed=0)[0][1]
    segment = replace(segment, input_ids=segment.input_ids[:2], labels=segment.labels[:2])
    logits = parity._logits(reference, [segment], config, torch.device("cpu"))
    (errors,) = parity._compare(Model(), pack_for(reference, [segment], config), [logits], torch.device("cpu"))
    # absolute differences 0, 1, 1, 0.5; absolute reference logits 1, 1, 4, 0
    expected = {"mae": 0.625, "mre": 0.625 / 1.5, "max_difference": 1.0, "max_logit": 4.0}
    assert errors == expected | {"rounding_mae": 0.0, "rounding_mre": 0.0}


def test_inputs_depend_only_on_the_seed_and_have_no_extra_placeholders() -> None:
    config = smallest_config()
    inputs, again = (random_inputs(config, 25, seed=3) for _ in range(2))
    other = random_inputs(config, 25, seed=4)
    assert all(torch.equal(one.input_ids, two.input_ids) for (_, one), (_, two) in zip(inputs, again, strict=True))
    assert not all(torch.equal(one.input_ids, two.input_ids) for (_, one), (_, two) in zip(inputs, other, strict=True))
    for kind, segment in inputs:
        for token, grids in (
            (config.tokens.image, segment.image_grid_thw),
            (config.tokens.video, segment.video_grid_thw),
        ):
            assert int((segment.input_ids == token).sum()) == int(grids.prod(-1).sum()) // 4
        assert (len(segment.image_grid_thw) > 0) == (kind in ("image", "images", "mixed"))
        assert (len(segment.video_grid_thw) > 0) == (kind in ("video", "mixed"))
    blind = replace(config, tokens=replace(config.tokens, video=None))
    assert {kind for kind, _ in random_inputs(blind, 9, seed=0)} == {"text", "image", "images"}


def test_the_error_of_an_unsupported_family_lists_the_supported_ones(qwen2_5_vl: Path) -> None:
    document = json.loads((qwen2_5_vl / "config.json").read_text())
    (qwen2_5_vl / "config.json").write_text(json.dumps(document | {"model_type": "gpt2"}))
    families = "mindvl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen2, qwen3, qwen3_moe, deepseek_v3"
    with pytest.raises(ModelError, match=f"model_type='gpt2' is not supported. Use a directory of one of {families}"):
        check_parity(qwen2_5_vl)


def test_a_missing_model_directory_raises_a_weight_error(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"config.json: does not exist"):
        check_parity(tmp_path)
