# SPDX-License-Identifier: Apache-2.0
"""The vision encoder and the mergers of Qwen3-VL equal those of transformers in outputs and gradients."""

from typing import Any

import pytest
import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from mindvl_model import VisionConfig
from mindvl_model.hf.inputs import normalized_pixels
from mindvl_model.hf.vision_json import write_vision
from mindvl_model.parallel_config import BuildConfig, RecomputeConfig
from mindvl_model.testing.tiny import randomize
from mindvl_model.vision.positions import patch_order
from mindvl_model.weights.names import _projector, _vision

GRIDS = [(1, 6, 10), (1, 2, 2), (2, 4, 8), (1, 14, 4), (1, 2, 26)]
OUTPUT_SIZE = 24


def small(**changes: Any) -> VisionConfig:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_layers": 3, "num_heads": 2, "ffn_hidden_size": 28}
    return VisionConfig(
        kind="qwen3_vl", **sizes | {"num_position_embeddings": 50, "deepstack_layers": (0, 1)} | changes
    )


def build_pair(config: VisionConfig, build_config: BuildConfig) -> tuple[Any, Any, Any]:
    """The encoder, its projector, and the transformers model with the same weights."""
    from mindvl_model.projector import Projector
    from mindvl_model.vision.encoder import VisionEncoder

    own = torch.nn.ModuleDict(
        {"vision": VisionEncoder(config, build_config), "projector": Projector(config, OUTPUT_SIZE, build_config)}
    )
    randomize(own, seed=1)
    published: Any = Qwen3VLVisionModel._from_config(Qwen3VLVisionConfig(**write_vision(config, OUTPUT_SIZE)))
    state = published_names(config, {name: one.detach() for name, one in own.named_parameters()})
    published.load_state_dict(state)
    return own["vision"], own["projector"], published


def published_names(config: VisionConfig, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    rules = [*_vision(config), *_projector(config)]
    assert {rule.param_name for rule in rules} == set(values)
    pairs = [pair for rule in rules for pair in zip(rule.hf_names, rule.split(values[rule.param_name]), strict=True)]
    return {name.removeprefix("model.visual."): value for name, value in pairs}


@pytest.mark.parametrize("num_positions", [2304, 49, 50, 1, 4])
def test_positions_are_interpolated_as_in_transformers(num_positions: int) -> None:
    order = patch_order(GRIDS, small(num_position_embeddings=num_positions))
    grids, side = torch.tensor(GRIDS), int(num_positions**0.5)
    rows, weights = get_vision_interpolation_indices_and_weights(
        grids, num_grid_per_side=side, align_corners=True, spatial_merge_size=2
    )
    assert order.rows is not None
    assert order.row_weights is not None
    assert torch.equal(order.rows, rows)
    torch.testing.assert_close(order.row_weights, weights, rtol=0, atol=0)
    assert torch.equal(order.positions, get_vision_position_ids(grids, 2))
    assert order.windows == order.full


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"deepstack_layers": ()},
        {"deepstack_layers": (2, 0)},
        {"num_layers": 5, "deepstack_layers": (1, 3, 4), "patch_size": 8, "num_position_embeddings": 9},
    ],
    ids=["two outputs", "no deepstack", "last layer first", "five layers"],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_visual_tokens_and_gradients_are_those_of_transformers(changes: dict[str, Any], recompute: Any) -> None:
    config = small(**changes)
    build_config = BuildConfig(recompute=RecomputeConfig(kind=recompute))
    encoder, projector, published = build_pair(config, build_config)
    generator = torch.Generator().manual_seed(2)
    size = (sum(t * h * w for t, h, w in GRIDS), 3 * config.patch_size**2)
    pixels = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    actual = projector(encoder(pixels, patch_order(GRIDS, config)))
    outputs = published(normalized_pixels(pixels, config), grid_thw=torch.tensor(GRIDS))
    expected = torch.cat((outputs.pooler_output, *outputs.deepstack_features), dim=-1)
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
    wanted = torch.randn(actual.shape, generator=generator)
    (actual * wanted).sum().backward()
    (expected * wanted).sum().backward()
    own = {f"vision.{name}": one for name, one in encoder.named_parameters()}
    own |= {f"projector.{name}": one for name, one in projector.named_parameters()}
    gradients = published_names(config, {name: one.grad for name, one in own.items()})
    for name, parameter in published.named_parameters():
        assert (gradients[name] - parameter.grad).abs().max() <= 2e-5 * parameter.grad.abs().max(), name
