# SPDX-License-Identifier: Apache-2.0
"""Quantized weights below adapters: values, gradients, layouts and what is refused, with the real bitsandbytes on the CPU."""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch

from mindvl_model import MindVLConfig
from mindvl_model.adapters import LoRAConfig
from mindvl_model.errors import ModelError
from mindvl_model.megatron.adapters import add_adapters, is_adapter
from mindvl_model.megatron.quantized import QuantizedWeight, _Linear, quantize_base
from mindvl_model.parallel_config import BuildConfig, ParallelConfig
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.layouts import Job, in_one_process, run_jobs
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen3_moe

# Sizes of which each rank of two has rows of whole blocks of 64 elements.
ALIGNED = replace(
    smallest_config(),
    vision=replace(smallest_config().vision, hidden_size=128, ffn_hidden_size=128),
    language=replace(
        smallest_config().language,
        hidden_size=64,
        ffn_hidden_size=128,
        attention=replace(smallest_config().language.attention, head_dim=32),
    ),
)
NF4 = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
       0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)  # fmt: skip
# arXiv 2305.14314, appendix E


def packs_of(config: MindVLConfig) -> list[dict[str, Any]]:
    segments = [
        random_segment(config, seed=0, grids=[(1, 4, 4), (1, 8, 6)], num_text=9),
        random_segment(config, num_text=20),
    ]
    return [pack_segments(segments, padding=3, pad_id=config.tokens.pad)]


def randomized(model: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def quantized_names(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, QuantizedWeight)]


def test_four_bits_are_the_nearest_nf4_value_times_the_largest_of_each_block() -> None:
    weight = 0.02 * torch.randn(48, 40, generator=torch.Generator().manual_seed(0))
    found = QuantizedWeight(weight, 4, nested=False)
    assert found.packed.numel() == weight.numel() // 2
    blocks = weight.view(-1, 64)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    nearest = ((blocks / largest)[..., None] - torch.tensor(NF4)).abs().argmin(dim=-1)
    expected = (torch.tensor(NF4)[nearest] * largest).view(48, 40)
    torch.testing.assert_close(found.dequantized(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("bits", [4, 8])
def test_shards_of_whole_blocks_have_the_values_of_the_whole_weight(bits: Any) -> None:
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    whole = QuantizedWeight(weight, bits, nested=False).dequantized()
    for axis in (0, 1):
        shards = [QuantizedWeight(one, bits, nested=False).dequantized() for one in weight.chunk(2, dim=axis)]
        assert torch.equal(torch.cat(shards, dim=axis), whole)


@pytest.mark.parametrize(
    ("bits", "nested", "bound"), [(4, False, 0.11), (4, True, 0.12), (8, False, 0.012), (8, True, 0.025)]
)
def test_the_error_and_the_bytes_of_a_weight_are_those_of_its_bits(bits: Any, nested: bool, bound: float) -> None:
    weight = 0.02 * torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    found = QuantizedWeight(weight, bits, nested=nested)
    assert 0 < (found.dequantized() - weight).norm() / weight.norm() < bound
    blocks = found.blocks
    scales = blocks.absmax.nbytes + (blocks.state2.absmax.nbytes if nested else 0)
    expected = LoRAConfig(base_bits=bits, double_quantization=nested).base_bytes
    assert (found.packed.nbytes + scales) / weight.numel() == pytest.approx(expected, rel=1e-3)


def test_a_conversion_of_the_model_keeps_packed_values_and_scales() -> None:
    weight = QuantizedWeight(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), 8, nested=False)
    before = weight.dequantized()
    assert torch.equal(torch.nn.Sequential(weight).bfloat16()[0].dequantized(), before)  # type: ignore[operator]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_keeps_no_dequantized_weight_and_equals_plain_lora_over_it(bits: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = QuantizedWeight(torch.randn(96, 64, generator=generator), bits, nested=True)
    x, bias = torch.randn(7, 64, generator=generator), torch.randn(96, generator=generator)
    a, b = torch.randn(4, 64, generator=generator), torch.randn(96, 4, generator=generator)
    gradients, kept = [], []

    def keep(one: Any) -> Any:
        kept.append(one)
        return one

    for plain in (True, False):
        leaves = [one.clone().requires_grad_() for one in (x, a, b)]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            base = (
                torch.nn.functional.linear(leaves[0], weight.dequantized(), bias)
                if plain
                else _Linear.apply(leaves[0], weight, bias, None)
            )
        assert len(kept) == (1 if plain else 0)  # the dequantized weight
        kept.clear()
        loss = (base + 2 * leaves[0] @ leaves[1].T @ leaves[2].T).square().sum()
        gradients.append(torch.autograd.grad(loss, leaves))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "config",
    [smallest_config(), smallest_qwen3_moe(aux_loss_weight=0.0), smallest_deepseek_v3(num_layers=3)],
    ids=["Qwen3", "Qwen3-MoE", "DeepSeek-V3"],
)
def test_loss_and_gradients_are_those_of_adapters_over_the_dequantized_weights(
    make_model: Any, config: MindVLConfig, bits: Any
) -> None:
    """Every linear layer but the output layer, routers and prediction layers; the others keep their weights."""
    lora = LoRAConfig(rank=3, targets=("o_proj", "down_proj", "up_proj", "qkv", "mlp.0"), base_bits=bits)
    (pack,) = packs_of(config)
    models = [make_model(config), make_model(config)]
    for model in models:
        add_adapters(model, config, lora)
        randomized(model)
    with torch.no_grad():
        full = models[0](**pack).item()
    quantize_base(models[1], config, lora)
    names = quantized_names(models[1])
    assert {name.split(".")[-2] for name in names} >= {"linear_proj", "linear_fc1", "linear_fc2", "fc1", "fc2"}
    assert not any("output_layer" in name or "router" in name or ".mtp." in name for name in names)
    for name in names:
        models[0].get_parameter(name).data.copy_(models[1].get_submodule(name).dequantized())
    plain, found = (model(**pack) for model in models)
    assert found.item() == pytest.approx(plain.item(), rel=1e-6)
    assert found.item() != full
    assert found.item() == pytest.approx(full, rel=0.1 if bits == 4 else 0.01)
    plain.backward()
    found.backward()
    gradients = [{name: one.grad for name, one in model.named_parameters() if one.grad is not None} for model in models]
    assert gradients[0]
    assert all(is_adapter(name) for name in gradients[0])
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert (gradients[1][name] - gradient).abs().max() <= 1e-5 * max(1e-3, gradient.abs().max()), name


@pytest.mark.slow
@pytest.mark.multi
def test_two_tensor_parallel_processes_equal_one_if_shards_have_whole_blocks(tmp_path: Any) -> None:
    for bits in (4, 8):
        lora = LoRAConfig(rank=3, base_bits=bits, double_quantization=False)  # type: ignore[arg-type]
        expected, weights = in_one_process(ALIGNED, packs_of(ALIGNED), lora=lora)
        plain, _ = in_one_process(ALIGNED, packs_of(ALIGNED), lora=replace(lora, base_bits=16))
        directory = tmp_path / str(bits)
        directory.mkdir()
        build = BuildConfig(parallel=ParallelConfig(tp_size=2))
        job = Job(config=ALIGNED, packs=packs_of(ALIGNED), weights=weights, build_config=build, lora=lora)
        (found,) = run_jobs([job], directory)
        assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5)
        assert expected.loss_sum != pytest.approx(plain.loss_sum, rel=1e-5)
        assert found.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            # 6e-5 without quantization, 0.2 with other scales: this model amplifies small differences.
            assert (found.gradients[name] - gradient).abs().max() <= 1e-3 * gradient.abs().max(), name


def test_without_bitsandbytes_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch, make_model: Any) -> None:
    model = make_model(smallest_config())
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(ModelError, match=r"adapter\.base_bits: is 4, .*pip install 'mindvl-model\[quantized\]'"):
        quantize_base(model, smallest_config(), LoRAConfig(base_bits=4))
    quantize_base(model, smallest_config(), LoRAConfig())  # 16 bits need no package
