# SPDX-License-Identifier: Apache-2.0
"""Parts of parameters, freezing, and initialization that depends only on names and seed."""

import math
from collections.abc import Callable
from typing import Any

import torch

from mindvl_model.parameters import initialize, initialize_parameter, parameter_group, set_trainable
from mindvl_model.testing.tiny import smallest_config
from mindvl_model.weights.sharding import Block, Share, own_block

CONFIG = smallest_config()


def named(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_only_the_chosen_parts_are_trainable(make_model: Callable[..., Any]) -> None:
    model = make_model(CONFIG)
    set_trainable(model, ["projector"])
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {"projector"}
    set_trainable(model, ["vision", "language"])
    assert {name.split(".")[0] for name, p in model.named_parameters() if not p.requires_grad} == {"projector"}


def test_the_group_is_the_first_piece_of_the_name() -> None:
    assert parameter_group("vision.blocks.layers.0.mlp.linear_fc1.weight") == "vision"
    assert parameter_group("language.output_layer.weight") == "language"


def test_initialization_depends_only_on_the_seed(make_model: Callable[..., Any]) -> None:
    first = make_model(CONFIG)
    initialize(first, CONFIG, seed=1)
    torch.randn(1000)
    second = make_model(CONFIG, seed=5)
    initialize(second, CONFIG, seed=1)
    other = make_model(CONFIG)
    initialize(other, CONFIG, seed=2)
    for name, value in named(first).items():
        assert torch.equal(value, named(second)[name]), name
        drawn = "norm" not in name and not name.endswith("bias")
        assert torch.equal(value, named(other)[name]) != drawn, name


def test_a_start_does_not_depend_on_the_order_parts_were_built_in(make_model: Callable[..., Any]) -> None:
    model = make_model(CONFIG)
    initialize(model, CONFIG, seed=1)
    whole = named(model)
    alone = torch.nn.ModuleDict({"projector": make_model(CONFIG, seed=9).projector})  # the last part, built alone
    initialize(alone, CONFIG, seed=1)
    for name, value in named(alone).items():
        assert torch.equal(value, whole[name]), name


def test_norms_start_at_one_biases_at_zero_and_residual_writers_smaller(make_model: Callable[..., Any]) -> None:
    config = smallest_config(vocab_size=2000)
    model = make_model(config)
    initialize(model, config, seed=0)
    values = named(model)
    assert bool((values["language.decoder.layers.0.input_layernorm.weight"] == 1).all())
    assert bool((values["vision.blocks.layers.0.self_attention.linear_qkv.bias"] == 0).all())
    assert abs(values["language.embedding.word_embeddings.weight"].std().item() - 0.1) < 0.003
    assert abs(values["language.decoder.layers.1.mlp.linear_fc2.weight"].std().item() - 0.1 / math.sqrt(4)) < 0.004


def test_tensor_parallel_ranks_draw_their_shares_of_the_whole_parameters() -> None:
    layer = "language.decoder.layers.0."
    for name, shape, axis, sections in (
        ("language.embedding.word_embeddings.weight", (12, 8), 0, 1),
        (f"{layer}self_attention.linear_proj.weight", (6, 8), 1, 1),
        (
            f"{layer}mlp.linear_fc1.weight",
            (16, 6),
            0,
            2,
        ),  # each rank has half of the gate and half of the up projection
    ):
        whole = torch.empty(shape)
        initialize_parameter(name, whole, CONFIG, seed=1)
        pieces = whole.chunk(2 * sections, dim=axis)
        for rank in range(2):
            expected = torch.cat(pieces[rank::2], dim=axis)
            own = torch.empty(expected.shape)
            initialize_parameter(name, own, CONFIG, 1, Share(tp_rank=rank, tp_size=2))
            assert torch.equal(own, expected), name


def test_both_halves_of_a_gated_mlp_are_split_and_an_mlp_without_a_gate_has_none() -> None:
    name, share = "vision.blocks.layers.0.mlp.linear_fc1.weight", Share(tp_rank=1, tp_size=2)
    assert own_block(name, share) == Block(0, 1, 2, sections=2)
    assert own_block(name, share, gated=False) == Block(0, 1, 2)
