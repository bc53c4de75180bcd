# SPDX-License-Identifier: Apache-2.0
"""Positions, windows and vision encoder equal those of Qwen2.5-VL in transformers."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionRotaryEmbedding,
)
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from mindvl_model import ModelError, VisionConfig
from mindvl_model.hf.inputs import normalized_pixels
from mindvl_model.testing.tiny import randomize, smallest_config
from mindvl_model.vision.positions import patch_order, rotary_angles

GRIDS = [(1, 6, 10), (1, 2, 2), (2, 4, 8), (1, 14, 4)]


def random_grids(seed: int) -> list[tuple[int, int, int]]:
    choose = random.Random(seed)
    return [
        (choose.choice([1, 1, 2, 3]), 2 * choose.randint(1, 11), 2 * choose.randint(1, 11))
        for _ in range(choose.randint(1, 4))
    ]


def published_config(config: VisionConfig, output_size: int) -> Qwen2_5_VLVisionConfig:
    return Qwen2_5_VLVisionConfig(
        depth=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        intermediate_size=config.ffn_hidden_size,
        fullatt_block_indexes=list(config.full_attention_layers),
        window_size=config.window_size,
        out_hidden_size=output_size,
    )


def copy_weights(config: VisionConfig, vision_encoder: Any, published: Any) -> None:
    """Copy weights to the transformers model by hand, without the conversion that other tests check."""
    heads, size = config.num_heads, config.head_dim
    kernel = (config.hidden_size, 3, 2, config.patch_size, config.patch_size)
    with torch.no_grad():
        published.patch_embed.proj.weight.copy_(vision_encoder.patch_embed.weight.reshape(kernel))
        for own_layer, hf_layer in zip(vision_encoder.blocks.layers, published.blocks, strict=True):
            hf_layer.norm1.weight.copy_(own_layer.input_layernorm.weight)
            hf_layer.norm2.weight.copy_(own_layer.pre_mlp_layernorm.weight)
            for kind in ("weight", "bias"):
                mixed = getattr(own_layer.self_attention.linear_qkv, kind)
                for part, head in itertools.product(range(3), range(heads)):  # q, k, v of each head together
                    source = mixed[(3 * head + part) * size :][:size]
                    getattr(hf_layer.attn.qkv, kind)[(part * heads + head) * size :][:size] = source
                getattr(hf_layer.attn.proj, kind).copy_(getattr(own_layer.self_attention.linear_proj, kind))
                gate_and_up = getattr(own_layer.mlp.linear_fc1, kind)
                getattr(hf_layer.mlp.gate_proj, kind).copy_(gate_and_up[: config.ffn_hidden_size])
                getattr(hf_layer.mlp.up_proj, kind).copy_(gate_and_up[config.ffn_hidden_size :])
                getattr(hf_layer.mlp.down_proj, kind).copy_(getattr(own_layer.mlp.linear_fc2, kind))


def build_pair(config: VisionConfig) -> tuple[Any, Any]:
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_model.vision.encoder import VisionEncoder

    vision_encoder = VisionEncoder(config, BuildConfig())
    randomize(vision_encoder, seed=1)
    published = Qwen2_5_VisionTransformerPretrainedModel._from_config(published_config(config, output_size=24))
    copy_weights(config, vision_encoder, published)
    return vision_encoder, published


def assert_near(actual: torch.Tensor, expected: torch.Tensor, bound: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("window_size", [56, 112])
def test_order_windows_and_frames_are_those_of_transformers(seed: int, window_size: int) -> None:
    config = replace(smallest_config().vision, window_size=window_size)
    grids = random_grids(seed)
    found = patch_order(grids, config)
    grid_thw = torch.tensor(grids)
    order, cu_window_seqlens = get_vision_window_index(grid_thw, 2, window_size, 14)
    assert found.order is not None
    assert found.restore is not None
    assert torch.equal(found.order, order)
    assert torch.equal(found.order[found.restore], torch.arange(len(order)))
    assert torch.equal(found.windows.cu_seqlens("cpu"), cu_window_seqlens)
    assert torch.equal(found.full.cu_seqlens("cpu"), get_vision_cu_seqlens(grid_thw))
    expected = get_vision_position_ids(grid_thw, 2).reshape(-1, 4, 2)[order].reshape(-1, 2)
    assert torch.equal(found.positions, expected)


def test_without_window_attention_patches_keep_their_order() -> None:
    config = replace(smallest_config().vision, full_attention_layers=(0, 1))
    found = patch_order([(1, 4, 6), (1, 8, 2)], config)
    assert found.order is None
    assert found.restore is None
    assert torch.equal(found.positions, get_vision_position_ids(torch.tensor([(1, 4, 6), (1, 8, 2)]), 2))


def test_rotary_angles_are_those_of_transformers() -> None:
    config = smallest_config().vision
    positions = get_vision_position_ids(torch.tensor(GRIDS), 2)
    embedding = Qwen2_5_VLVisionRotaryEmbedding(published_config(config, 24))
    expected = embedding(torch.zeros(1), positions)
    for actual, published in zip(rotary_angles(positions, config.head_dim, 10000.0), expected, strict=True):
        torch.testing.assert_close(actual, published.view_as(actual), rtol=0, atol=1e-6)


@pytest.mark.parametrize("full_attention_layers", [(1,), (0, 1), ()], ids=["windowed and full", "full", "windowed"])
def test_the_vision_encoder_gives_what_transformers_gives(full_attention_layers: tuple[int, ...]) -> None:
    config = replace(smallest_config().vision, full_attention_layers=full_attention_layers)
    vision_encoder, published = build_pair(config)
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randint(0, 256, (sum(t * h * w for t, h, w in GRIDS), 588), generator=generator, dtype=torch.uint8)
    patches = patch_order(GRIDS, config)
    actual = vision_encoder(pixels, patches)
    expected = published(normalized_pixels(pixels, config), grid_thw=torch.tensor(GRIDS)).last_hidden_state
    order, _ = get_vision_window_index(torch.tensor(GRIDS), 2, config.window_size, 14)
    if patches.order is None:  # transformers orders patches by window even if no layer uses windows
        expected = expected.view(-1, 4, 16)[torch.argsort(order)].view(-1, 16)
    assert_near(actual, expected)


def test_videos_beside_images_give_what_transformers_gives() -> None:
    config = smallest_config().vision
    vision_encoder, published = build_pair(config)
    generator = torch.Generator().manual_seed(4)
    videos = [(3, 4, 6), (2, 2, 10)]
    counts = [sum(t * h * w for t, h, w in grids) for grids in (GRIDS, videos)]
    pixels, frames = (
        torch.randint(0, 256, (count, size), generator=generator, dtype=torch.uint8)
        for count, size in zip(counts, (588, 1176), strict=True)
    )
    actual = vision_encoder(pixels, patch_order(GRIDS + videos, config), frames)
    patches = torch.cat([normalized_pixels(pixels, config), normalized_pixels(frames, config)])
    expected = published(patches, grid_thw=torch.tensor(GRIDS + videos)).last_hidden_state
    assert_near(actual, expected)
    with pytest.raises(ModelError, match="pixel_values_videos: patches must have 3 x 2 x 14 x 14 values, got 588"):
        vision_encoder.patch_embed(pixels, pixels)


def test_gradients_of_the_vision_encoder_are_those_of_transformers() -> None:
    config = smallest_config().vision
    vision_encoder, published = build_pair(config)
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (sum(t * h * w for t, h, w in GRIDS), 588), generator=generator, dtype=torch.uint8)
    wanted = torch.randn(len(pixels), 16, generator=generator)
    (vision_encoder(pixels, patch_order(GRIDS, config)) * wanted).sum().backward()
    hf_hidden = published(normalized_pixels(pixels, config), grid_thw=torch.tensor(GRIDS)).last_hidden_state
    (hf_hidden * wanted).sum().backward()
    # Compare gradients by the same mapping of names as weights: two vision encoders hold the gradients as weights.
    gradients, expected = build_pair(config)
    with torch.no_grad():
        for name, parameter in gradients.named_parameters():
            parameter.copy_(vision_encoder.get_parameter(name).grad)
    copy_weights(config, gradients, expected)
    for name, parameter in published.named_parameters():
        if not name.startswith("merger"):
            assert_near(expected.get_parameter(name), parameter.grad, bound=2e-5)


def test_patches_of_another_size_are_refused() -> None:
    vision_encoder, _ = build_pair(smallest_config().vision)
    with pytest.raises(ModelError, match=r"pixel_values: patches must have 3 x 14 x 14 values, got 768"):
        vision_encoder.patch_embed(torch.zeros(4, 768, dtype=torch.uint8))


def test_pixels_are_normalized_in_float32_also_with_16_bit_weights() -> None:
    patch_embed = build_pair(smallest_config().vision)[0].patch_embed
    shift, scale = patch_embed.pixel_shift.clone(), patch_embed.pixel_scale.clone()
    patch_embed.bfloat16()
    assert patch_embed.weight.dtype == torch.bfloat16
    assert torch.equal(patch_embed.pixel_shift, shift)
    assert torch.equal(patch_embed.pixel_scale, scale)
