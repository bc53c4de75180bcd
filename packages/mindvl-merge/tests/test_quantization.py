# SPDX-License-Identifier: Apache-2.0
"""Block-scaled float8 values, as DeepSeek-V3 stores them: against dequantization by hand."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindvl_merge import MergeConfig, MergeError, digests, merge

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 3], "fmt": "e4m3"}}


def _write(path, tensors, config):
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "hidden_size": 5} | config))
    return path


@pytest.fixture
def quantized(tmp_path):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(10, 5, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator)
    tensors = {
        "model.layers.0.w.weight": values,
        "model.layers.0.w.weight_scale_inv": scales,
        "n": torch.ones(5).bfloat16(),
    }
    expected = values.float() * scales.repeat_interleave(4, 0)[:10].repeat_interleave(3, 1)[:, :5]
    return _write(tmp_path / "fp8", tensors, FP8), expected


def test_float8_and_bfloat16_models_are_averaged(tmp_path, quantized):
    path, values = quantized
    other = torch.randn(10, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    two = _write(tmp_path / "bf16", {"model.layers.0.w.weight": other, "n": torch.zeros(5).bfloat16()}, {})
    for order in ((path, two), (two, path)):
        out = tmp_path / f"out-{order[0].name}"
        document = merge(MergeConfig(models=order, out=out))
        merged = load_file(out / "model.safetensors")
        assert merged.keys() == {"model.layers.0.w.weight", "n"}
        assert torch.equal(merged["model.layers.0.w.weight"], ((values + other.float()) / 2).bfloat16())
        assert merged["n"].tolist() == [0.5] * 5
        assert "quantization_config" not in json.loads((out / "config.json").read_text())
        assert document["unused"] == []
        assert all(model["complete"] for model in document["models"])


def test_the_block_size_may_be_in_the_section_of_the_language_model(tmp_path, quantized):
    tensors, values = load_file(quantized[0] / "model.safetensors"), quantized[1]
    path = _write(tmp_path / "vl", tensors, {"text_config": {"hidden_size": 5} | FP8})  # blocks of 4 x 3, not 128 x 128
    merge(MergeConfig(models=(path, path), out=tmp_path / "out"))
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(merged["model.layers.0.w.weight"], values.bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text_config"] == {"hidden_size": 5}


def test_float8_models_alone_become_bfloat16(tmp_path, quantized):
    path, values = quantized
    merge(MergeConfig(models=(path, path), out=tmp_path / "out"))
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(merged["model.layers.0.w.weight"], values.bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, config: tensors.pop("model.layers.0.w.weight_scale_inv"), "float8 values without"),
        (
            lambda tensors, config: tensors.update({"model.layers.0.w.weight_scale_inv": torch.ones(2, 2)}),
            r"has scales of shape \[2, 2\], expected \(3, 2\)",
        ),
        (
            lambda tensors, config: config.update(quantization_config={"quant_method": "gptq"}),
            "quant_method 'gptq' .* is not supported",
        ),
        (
            lambda tensors, config: tensors["model.layers.0.w.weight_scale_inv"].fill_(float("nan")),
            "has values outside the range|has NaN",
        ),
    ],
)
def test_damage_and_other_quantization_are_named(tmp_path, quantized, change, message):
    tensors = load_file(quantized[0] / "model.safetensors")
    config = dict(FP8)
    change(tensors, config)
    path = _write(tmp_path / "bad", tensors, config)
    with pytest.raises(MergeError, match=message):
        merge(MergeConfig(models=(path, path), out=tmp_path / "out"))


@pytest.mark.parametrize("method", ["average", "slerp"])
def test_rows_longer_than_a_block_are_read_in_parts(tmp_path, monkeypatch, method):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 37, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 13, generator=generator)
    tensors = {"model.w.weight": values, "model.w.weight_scale_inv": scales}
    expected = values.float() * scales.repeat_interleave(4, 0)[:5].repeat_interleave(3, 1)[:, :37]
    path = _write(tmp_path / "fp8", tensors, FP8)
    monkeypatch.setattr(digests, "BLOCK_VALUES", 10)  # fewer than 37
    merge(MergeConfig(models=(path, path), out=tmp_path / "out", method=method, dtype="fp32"))
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["model.w.weight"], expected)
