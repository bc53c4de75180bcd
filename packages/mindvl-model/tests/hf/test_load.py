# SPDX-License-Identifier: Apache-2.0
"""Directories of every naming version give the same weights, and unknown or missing tensors raise errors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from mindvl_model import MindVLConfig, WeightError
from mindvl_model.hf.config_json import hf_config
from mindvl_model.hf.export import export_hf_directory
from mindvl_model.hf.load import DirectorySource, load_hf_directory
from mindvl_model.hf.processor_files import ProcessorSettings
from mindvl_model.parameters import PARTS
from mindvl_model.testing.tiny import save_qwen2_5_vl, smallest_config, smallest_deepseek_v3, smallest_qwen2_5_vl
from mindvl_model.weights.sharding import Share

CONFIG = smallest_qwen2_5_vl()
SETTINGS = ProcessorSettings(min_pixels=784, max_pixels=7840)
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_qwen2_5_vl(CONFIG, tmp_path / "published")
    return tmp_path / "published"


def rewrite(directory: Path, change: Change) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def renamed(*pairs: tuple[str, str]) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in tensors.items():
            new = next((to + name.removeprefix(start) for start, to in pairs if name.startswith(start)), name)
            found[new] = tensor
        return found

    return change


GENERATIONS = {
    "as published": (),
    "transformers 5 in memory": (("visual.", "model.visual."), ("model.", "model.language_model.")),
    "vision_encoder renamed only": (("visual.", "model.visual."),),
}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_naming_generation_gives_the_same_model(
    make_model: Callable[..., Any], directory: Path, generation: str
) -> None:
    expected, model = make_model(CONFIG, seed=1), make_model(CONFIG, seed=2)
    load_hf_directory(expected, CONFIG, directory)
    assert any(name.startswith("visual.") for name in load_file(directory / "model.safetensors"))
    rewrite(directory, renamed(*GENERATIONS[generation]))
    report = load_hf_directory(model, CONFIG, directory)
    assert len(report.loaded) == len(list(model.parameters()))
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_two_halves_and_a_fresh_projector_make_a_model(
    make_model: Callable[..., Any], directory: Path, tmp_path: Path
) -> None:
    """As in MindVL-8B: vision encoder of Qwen2.5-VL, decoder of Qwen3, projector unchanged."""
    config = smallest_config()
    qwen3 = Qwen3ForCausalLM(Qwen3Config(**hf_config(config, torch.float32)["text_config"]))
    qwen3.save_pretrained(tmp_path / "qwen3")
    model, before = make_model(config), make_model(config)
    reports = [
        load_hf_directory(model, config, directory, ["vision"]),
        load_hf_directory(model, config, tmp_path / "qwen3", ["language"]),
    ]
    tensors = load_file(directory / "model.safetensors")
    used = {name for name in tensors if name.startswith("visual.") and "merger" not in name}
    assert set(reports[0].skipped) == set(tensors) - used
    assert reports[1].skipped == ()
    both = [name for report in reports for name in report.loaded]
    fresh = {name for name, _ in model.named_parameters()} - set(both)
    assert fresh == {name for name, _ in model.named_parameters() if name.startswith("projector.")}
    for name in fresh:
        assert torch.equal(model.get_parameter(name), before.get_parameter(name))
    assert torch.equal(model.vision.patch_embed.weight, tensors["visual.patch_embed.proj.weight"].flatten(1))
    assert torch.equal(model.language.output_layer.weight, qwen3.lm_head.weight)


def test_the_report_lists_reshaped_and_converted_tensors(make_model: Callable[..., Any], directory: Path) -> None:
    rewrite(directory, lambda tensors: {n: t.half() if n.startswith("visual.") else t for n, t in tensors.items()})
    model = make_model(CONFIG, dtype=torch.bfloat16)
    report = load_hf_directory(model, CONFIG, directory)
    tensors = load_file(directory / "model.safetensors")
    halves = sum(tensor.dtype == torch.float16 for tensor in tensors.values())
    assert report.converted == {"float16 to bfloat16": halves, "float32 to bfloat16": len(tensors) - halves}
    assert "visual.patch_embed.proj.weight" in report.reshaped
    assert "model.layers.1.self_attn.k_proj.bias" in report.reshaped
    assert "visual.blocks.0.mlp.up_proj.weight" in report.reshaped
    assert not any("norm" in name for name in report.reshaped)
    assert torch.equal(model.vision.patch_embed.weight, tensors["visual.patch_embed.proj.weight"].flatten(1).bfloat16())


def test_a_tied_head_may_be_repeated_but_not_differ(make_model: Callable[..., Any], tmp_path: Path) -> None:
    config = smallest_qwen2_5_vl(tie_embeddings=True)
    save_qwen2_5_vl(config, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    rewrite(tmp_path, lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    report = load_hf_directory(make_model(config), config, tmp_path)
    assert report.redundant == ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1})
    with pytest.raises(WeightError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_hf_directory(make_model(config), config, tmp_path)


def without(*names: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def quantised(dtype: torch.dtype) -> Change:
    name = "model.layers.0.mlp.down_proj.weight"
    return lambda tensors: tensors | {name: tensors[name].to(dtype)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without("model.norm.weight", "visual.merger.ln_q.weight"),
            r"2 tensors are missing: model.visual.merger.ln_q.weight, .* \(the first is needed by projector.norm.weight\)",
        ),
        (quantised(torch.float8_e4m3fn), r"'model.layers.0.mlp.down_proj.weight' is stored as F8_E4M3, but only F32"),
        (quantised(torch.int8), r"model.safetensors: tensor 'model.layers.0.mlp.down_proj.weight' is stored as I8"),
        (
            lambda tensors: tensors | {"model.layers.2.mlp.up_proj.weight": torch.ones(1), "adapter": torch.ones(1)},
            "2 tensors do not belong to the model: adapter, model.layers.2.mlp.up_proj.weight",
        ),
        (
            lambda tensors: tensors | {"model.visual.merger.ln_q.weight": torch.ones(16)},
            "'visual.merger.ln_q.weight' and '?model.visual.merger.ln_q.weight'? are two names of the same tensor",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_loading(
    make_model: Callable[..., Any], directory: Path, change: Change, message: str
) -> None:
    rewrite(directory, change)
    model, before = make_model(CONFIG), make_model(CONFIG)
    with pytest.raises(WeightError, match=message) as caught:
        load_hf_directory(model, CONFIG, directory)
    assert str(directory) in str(caught.value)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before.get_parameter(name)), name


def test_a_model_with_fewer_layers_does_not_load_a_larger_one(make_model: Callable[..., Any], directory: Path) -> None:
    shorter = replace(CONFIG, language=replace(CONFIG.language, num_layers=1))
    with pytest.raises(WeightError, match=r"12 tensors do not belong to the model: model.layers.1"):
        load_hf_directory(make_model(shorter), shorter, directory, PARTS)


def test_8_bit_weights_are_refused_only_in_requested_parts(make_model: Callable[..., Any], directory: Path) -> None:
    rewrite(directory, quantised(torch.int8))
    report = load_hf_directory(make_model(CONFIG), CONFIG, directory, ["vision", "projector"])
    assert "model.layers.0.mlp.down_proj.weight" in report.skipped


@pytest.mark.parametrize(
    "config",
    [smallest_config(), smallest_config(tie_embeddings=True), smallest_deepseek_v3()],
    ids=["own head", "tied head", "deepseek_v3"],
)
def test_a_larger_vocabulary_keeps_stored_rows_and_initializes_the_rest_alike_in_every_layout(
    make_model: Callable[..., Any], tokenizer_directory: Path, tmp_path: Path, config: MindVLConfig
) -> None:
    held, directory = make_model(config, seed=1), tmp_path / "model"
    export_hf_directory(held, config, directory, tokenizer=tokenizer_directory, processor=SETTINGS)
    grown = replace(config, language=replace(config.language, vocab_size=192))
    model = make_model(grown, seed=2)
    report = load_hf_directory(model, grown, directory, seed=3)
    names = [f"language.{name}.weight" for name in ("embedding.word_embeddings", "output_layer")]
    names = names[: 1 if config.language.tie_embeddings else 2]
    assert report.untrained_rows == dict.fromkeys(names, 128)
    source = DirectorySource(directory, grown, seed=3)
    rules = {rule.param_name: rule for rule in source.rules}
    for name in names:
        weight = model.get_parameter(name)
        assert torch.equal(weight[:64], held.get_parameter(name))
        assert 0.08 < weight[64:].std() < 0.12  # init_std
        for tp_size in (2, 3, 6):  # pieces of rows that are stored, drawn, or both
            shares = [Share(tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]
            for share in shares:
                source.check(rules[name], (192 // tp_size, 24), share)
            pieces = [source.read(rules[name], torch.float32, share) for share in shares]
            assert torch.equal(torch.cat(pieces), weight), tp_size
    if len(names) == 2:
        assert not torch.equal(*(model.get_parameter(name)[64:] for name in names))


def test_a_smaller_vocabulary_than_the_directories_is_refused(make_model: Callable[..., Any], directory: Path) -> None:
    smaller = replace(CONFIG, language=replace(CONFIG.language, vocab_size=32))
    message = r"model.safetensors: .*embed_tokens.weight gives .* the shape \[64, 32\], but the model has \[32, 32\]"
    with pytest.raises(WeightError, match=message):
        load_hf_directory(make_model(smaller), smaller, directory)


EXPERT = "model.language_model.layers.1.mlp.experts.3.up_proj.weight"
MTP_COPY = "model.language_model.layers.3.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(EXPERT), f"1 tensors are missing: {EXPERT}"),
        (
            lambda tensors: tensors | {EXPERT: torch.zeros(11, 24)},
            rf"model.safetensors: {EXPERT} \[11, 24\] and 15 of shape \[12, 24\] cannot be converted to .*layers.1.mlp.experts",
        ),
        (
            lambda tensors: tensors | {EXPERT.replace(".3.", ".8."): torch.zeros(12, 24)},
            "1 tensors do not belong to the model: .*experts.8.up_proj",
        ),
        (
            lambda tensors: tensors | {EXPERT: torch.zeros(12, 24).to(torch.float8_e4m3fn)},
            rf"'{EXPERT}' is stored as F8_E4M3, but .* fp8 with scales \({EXPERT}_scale_inv\)",
        ),
        (
            lambda tensors: tensors | {MTP_COPY: tensors[MTP_COPY] + 1},
            r"layers.3.embed_tokens.weight: must equal .*embed_tokens.weight, because both are copies of one parameter",
        ),
    ],
    ids=["missing", "shape", "one too many", "fp8 without factors", "copies differ"],
)
def test_errors_of_experts_name_the_tensor(
    make_model: Callable[..., Any], tokenizer_directory: Path, tmp_path: Path, change: Change, message: str
) -> None:
    config, path = smallest_deepseek_v3(), tmp_path / "model"
    export_hf_directory(make_model(config), config, path, tokenizer=tokenizer_directory, processor=SETTINGS)
    rewrite(path, change)
    with pytest.raises(WeightError, match=message) as caught:
        load_hf_directory(make_model(config), config, path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600
