# SPDX-License-Identifier: Apache-2.0
"""Transformers directories become checkpoints and directories again, bit for bit, in little memory."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mindvl_model import MindVLConfig, MindVLModel, ModelError, WeightError, set_up_device
from mindvl_model.config import VisionConfig
from mindvl_model.families.qwen2 import Qwen2Preset
from mindvl_model.hf.config_json import hf_config
from mindvl_model.parameters import initialize, named_tensors
from mindvl_model.testing.tiny import (
    randomize,
    smallest_config,
    smallest_deepseek_v3,
    smallest_qwen3_moe,
    smallest_qwen3_vl,
    smallest_qwen3_vl_moe,
)
from mindvl_model.weights.directory import write_weights
from mindvl_model.weights.names import published_name, weight_rules
from mindvl_model.weights.sharding import split
from mindvl_train.checkpoints.convert import ConvertSource, convert_to_checkpoint
from mindvl_train.checkpoints.export import export_checkpoint
from mindvl_train.checkpoints.restore import load_weights

pytestmark = pytest.mark.slow

set_up_device()
QWEN3 = smallest_config(vocab_size=264, tie_embeddings=True)
QWEN2 = replace(
    QWEN3,
    language=Qwen2Preset(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_hidden_size=40,
        vocab_size=264,
        mrope_sections=(2, 1, 1),
        max_positions=512,
    ).decoder(),
)


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    from mindvl_model.megatron.process import single_process

    with single_process():
        yield


def make_model(config: MindVLConfig, dtype: torch.dtype, seed: int = 0) -> MindVLModel:
    from mindvl_model.megatron.blocks import BuildConfig

    model = MindVLModel(config, BuildConfig(dtype=dtype))
    randomize(model, seed)
    return model


def write_directory(model: Any, directory: Path, document: dict[str, Any] | None = None) -> Path:
    """Weights, config.json and image sizes, as transformers directories have them."""
    directory.mkdir()
    held, dtype = named_tensors(model), next(model.parameters()).dtype
    document = document or hf_config(model.mindvl, dtype)
    published = document["model_type"] == "qwen2_5_vl"
    tensors = [pair for rule in weight_rules(model.mindvl) for pair in split(rule, held[rule.param_name].detach())]
    write_weights(directory, [(published_name(name) if published else name, one) for name, one in tensors], 20_000)
    (directory / "config.json").write_text(json.dumps(document))
    vision = model.mindvl.vision
    images = {"min_pixels": 784, "max_pixels": 3136, "patch_size": vision.patch_size}
    images |= {"image_mean": vision.image_mean, "image_std": vision.image_std}
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    return directory


def read_imagefolder(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_bitwise(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (QWEN2, torch.bfloat16),
        (QWEN3, torch.float32),
        (smallest_qwen3_moe(vocab_size=264), torch.float32),
        (smallest_deepseek_v3(vocab_size=264, num_mtp_layers=2), torch.bfloat16),
        (smallest_qwen3_vl(vocab_size=264, tie_embeddings=True), torch.bfloat16),
        (smallest_qwen3_vl_moe(vocab_size=264), torch.float32),
    ],
    ids=["qwen2", "tied", "qwen3_moe", "deepseek_v3", "qwen3_vl", "qwen3_vl_moe"],
)
def test_a_directory_comes_back_bit_for_bit_through_a_checkpoint(
    config: MindVLConfig, dtype: torch.dtype, tokenizer_directory: Path, tmp_path: Path
) -> None:
    model = make_model(config, dtype)
    directory = write_directory(model, tmp_path / "directory")
    seen: list[tuple[int, int]] = []
    report = convert_to_checkpoint(
        ConvertSource(model=directory),
        tmp_path / "run",
        tokenizer=tokenizer_directory,
        file_bytes=30_000,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert report.precision == ("bf16" if dtype == torch.bfloat16 else "fp32")
    assert report.fresh == ()
    assert seen[-1][0] == seen[-1][1] == len(report.directories[directory].loaded)
    assert len(list((report.checkpoint / "tensors").glob("*.distcp"))) > 3

    other = make_model(config, dtype, seed=1)
    load_weights(report.checkpoint, other)
    assert_bitwise(named_tensors(other), named_tensors(model))

    export_checkpoint(tmp_path / "run", tmp_path / "again", shard_bytes=20_000)
    assert_bitwise(read_imagefolder(tmp_path / "again"), read_imagefolder(directory))
    sizes = [file.stat().st_size for file in (tmp_path / "again").glob("model-*.safetensors")]
    assert len(sizes) > 2


def test_a_language_model_in_fp8_as_deepseek_publishes_it_joins_a_vision_encoder(
    tokenizer_directory: Path, tmp_path: Path
) -> None:
    config, vision_encoder = smallest_deepseek_v3(vocab_size=264), make_model(QWEN2, torch.bfloat16, seed=2)
    model, other = make_model(config, torch.bfloat16), make_model(config, torch.bfloat16, seed=1)
    document = hf_config(config, torch.bfloat16)["text_config"]
    document |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}, "bos_token_id": 0}
    rope = document.pop("rope_parameters")
    document |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": rope.pop("rope_type")}}
    directory = write_directory(model, tmp_path / "language", document)
    vision = write_directory(vision_encoder, tmp_path / "vision")
    named = read_imagefolder(directory)
    tensors = {
        name.replace("model.language_model.", "model."): one for name, one in named.items() if "visual" not in name
    }
    rounded = dict(tensors)
    for file in directory.glob("*safetensors*"):
        file.unlink()
    quantised = [name for name in tensors if name.endswith("_proj.weight") and "eh_proj" not in name]
    for name in quantised:
        rows, columns = tensors[name].shape
        scales = torch.rand(-(-rows // 8), -(-columns // 8)) + 0.5
        spread = scales.repeat_interleave(8, 0)[:rows].repeat_interleave(8, 1)[:, :columns]
        tensors[name] = (tensors[name].float() / spread).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        rounded[name] = (tensors[name].float() * spread).bfloat16()
    write_weights(directory, tensors.items())
    source = ConvertSource(vision=vision, language=directory)
    report = convert_to_checkpoint(source, tmp_path / "run", tokenizer=tokenizer_directory)
    assert report.precision == "bf16"
    assert report.directories[directory].converted == {"float8_e4m3fn to bfloat16": len(quantised)}
    assert {name.split(".")[0] for name in report.fresh} == {"projector"}
    load_weights(report.checkpoint, other)
    held = named_tensors(other)
    for rule in weight_rules(config):
        for name, tensor in split(rule, held[rule.param_name].detach()):
            if "language_model" in name:
                assert torch.equal(tensor, rounded[name.replace("model.language_model.", "model.")]), name
    assert torch.equal(other.vision.patch_embed.weight, vision_encoder.vision.patch_embed.weight)


def test_vision_and_language_from_two_directories_with_a_fresh_projector(
    tokenizer_directory: Path, tmp_path: Path
) -> None:
    one, two = make_model(QWEN2, torch.bfloat16), make_model(QWEN3, torch.float32, seed=1)
    vision, language = write_directory(one, tmp_path / "vision"), write_directory(two, tmp_path / "language")
    report = convert_to_checkpoint(
        ConvertSource(vision=vision, language=language), tmp_path / "run", tokenizer=tokenizer_directory, seed=3
    )
    assert report.precision == "fp32"
    assert [name.split(".")[0] for name in report.fresh] == ["projector"] * 5
    assert {name.split(".")[0] for name in report.directories[vision].loaded} == {"vision"}
    assert "lm_head.weight" in report.directories[vision].skipped
    joined, fresh = make_model(QWEN3, torch.float32, seed=4), make_model(QWEN3, torch.float32)
    load_weights(report.checkpoint, joined)
    initialize(fresh, QWEN3, 3)
    for name, tensor in named_tensors(joined).items():
        source = {"vision": one, "language": two, "projector": fresh}[name.split(".")[0]]
        assert torch.equal(tensor, named_tensors(source)[name].float()), name


def test_a_larger_tokenizer_adds_rows_at_random(tokenizer_directory: Path, tmp_path: Path) -> None:
    config = replace(QWEN3, language=replace(QWEN3.language, vocab_size=200))
    model = make_model(config, torch.float32)
    directory = write_directory(model, tmp_path / "directory")
    report = convert_to_checkpoint(ConvertSource(model=directory), tmp_path / "run", tokenizer=tokenizer_directory)
    name = "language.embedding.word_embeddings.weight"
    assert report.directories[directory].untrained_rows == {name: 384 - 200}  # the next multiple of 128
    grown = replace(QWEN3, language=replace(QWEN3.language, vocab_size=384))
    other = make_model(grown, torch.float32)
    load_weights(report.checkpoint, other)
    assert torch.equal(other.get_parameter(name)[:200], model.get_parameter(name))


def test_a_damaged_directory_leaves_nothing_behind(tmp_path: Path) -> None:
    directory = write_directory(make_model(QWEN3, torch.float32), tmp_path / "directory")
    name = "model.visual.blocks.0.attn.qkv.weight"
    shard = directory / json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(shard)
    save_file(tensors | {name: torch.zeros(48, 15)}, shard, metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"blocks.0.attn.qkv.weight gives vision.* the shape"):
        convert_to_checkpoint(ConvertSource(model=directory), tmp_path / "run")
    assert not list(tmp_path.glob("run*"))
    (tmp_path / "run").mkdir()
    with pytest.raises(WeightError, match="run: already exists"):
        convert_to_checkpoint(ConvertSource(model=directory), tmp_path / "run")


def test_half_a_model_is_refused() -> None:
    with pytest.raises(ValueError, match="either one directory of a whole model"):
        ConvertSource()
    with pytest.raises(ModelError, match="both required"):
        convert_to_checkpoint(ConvertSource(vision=Path("nowhere")), Path("absent"))


MEASURE = """
    import re, sys
    from pathlib import Path
    from mindvl_model import set_up_device

    set_up_device()
    import torch._dynamo  # by the meta device, at its first use: the memory of imports is not measured
    import mindvl_train.weights
    from mindvl_model.hf import export
    from mindvl_train.checkpoints.convert import ConvertSource, convert_to_checkpoint
    from mindvl_train.checkpoints.export import export_checkpoint
    from transformers import AutoTokenizer

    def peak():
        return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    directory, tokenizer, out = map(Path, sys.argv[1:])
    AutoTokenizer.from_pretrained(tokenizer)
    before = peak()
    convert_to_checkpoint(ConvertSource(model=directory), out / "run", tokenizer=tokenizer)
    there = peak() - before
    export_checkpoint(out / "run", out / "again")
    print(there, peak() - before)
"""


def test_conversion_takes_less_memory_than_twice_the_largest_tensor_and_500_mb(
    tokenizer_directory: Path, tmp_path: Path
) -> None:
    config = replace(
        QWEN3,
        vision=VisionConfig(hidden_size=256, num_layers=8, num_heads=4, ffn_hidden_size=1024, full_attention_layers=()),
        language=replace(QWEN3.language, hidden_size=1024, num_layers=24, ffn_hidden_size=2048),
    )
    model = make_model(config, torch.float32)
    held = [tensor.nbytes for tensor in named_tensors(model).values()]
    assert sum(held) > 600e6
    directory = write_directory(model, tmp_path / "directory")
    del model
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(directory), str(tokenizer_directory), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    peaks = [int(number) for number in child.stdout.split()[-2:]]

    assert all(peak < 2 * max(held) + 500e6 for peak in peaks)
    assert max(peaks) < sum(held) / 3
    assert_bitwise(read_imagefolder(tmp_path / "again"), read_imagefolder(directory))
