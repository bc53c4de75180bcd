# SPDX-License-Identifier: Apache-2.0
"""The layers of adapters: their names, shapes, marks and checkpoint state; test_adapters.py compares their results."""

from typing import Any

from mindvl_model.adapters import LoRAConfig
from mindvl_model.megatron.adapters import adapted_layers, add_adapters, is_adapter
from mindvl_model.megatron.one_step import pieces
from mindvl_model.testing.tiny import smallest_config, smallest_qwen3_moe


def test_each_published_layer_has_its_own_matrices(make_model: Any) -> None:
    model = make_model(smallest_config())  # 24 features, 4 heads and 2 key-value heads of 8, 40 in the MLP
    add_adapters(model, smallest_config(), LoRAConfig(rank=5), ["language"])
    layer = "language.decoder.layers.0."
    shapes = {
        name.removeprefix(layer): list(parameter.shape)
        for name, parameter in model.named_parameters()
        if is_adapter(name) and name.startswith(layer)
    }
    assert shapes == {
        "self_attention.linear_qkv.lora.q_proj.A": [5, 24],
        "self_attention.linear_qkv.lora.q_proj.B": [32, 5],
        "self_attention.linear_qkv.lora.k_proj.A": [5, 24],
        "self_attention.linear_qkv.lora.k_proj.B": [16, 5],
        "self_attention.linear_qkv.lora.v_proj.A": [5, 24],
        "self_attention.linear_qkv.lora.v_proj.B": [16, 5],
        "self_attention.linear_proj.lora.o_proj.A": [5, 32],
        "self_attention.linear_proj.lora.o_proj.B": [24, 5],
        "mlp.linear_fc1.lora.gate_proj.A": [5, 24],
        "mlp.linear_fc1.lora.gate_proj.B": [40, 5],
        "mlp.linear_fc1.lora.up_proj.A": [5, 24],
        "mlp.linear_fc1.lora.up_proj.B": [40, 5],
        "mlp.linear_fc2.lora.down_proj.A": [5, 40],
        "mlp.linear_fc2.lora.down_proj.B": [24, 5],
    }


def test_checkpoints_have_whole_matrices_of_all_experts(make_model: Any) -> None:
    config = smallest_qwen3_moe()
    model = make_model(config)
    add_adapters(model, config, LoRAConfig(rank=5, targets=("o_proj", "up_proj")), ["language"])
    layer = "language.decoder.layers.1."
    whole = {name.removeprefix(layer): shape for name, shape, _, _ in pieces(model) if is_adapter(name)}
    own = {name: shape for name, shape in whole.items() if not name.startswith("language.")}
    assert own == {
        "self_attention.linear_proj.lora.o_proj.A": (5, 32),
        "self_attention.linear_proj.lora.o_proj.B": (24, 5),
        "mlp.experts.linear_fc1.lora.up_proj.A": (8, 24, 5),
        "mlp.experts.linear_fc1.lora.up_proj.B": (8, 5, 12),
    }


def test_gradients_of_replicated_matrices_are_not_counted_on_every_rank(make_model: Any) -> None:
    """Split matrices are marked for the gradient norm of megatron-core, whatever the layout."""
    config = smallest_config()
    model = make_model(config)
    add_adapters(model, config, LoRAConfig(rank=5), ["language"])
    for name, low_rank in adapted_layers(model):
        for factors in low_rank.children():
            split = factors.A if "linear_proj" in name or "linear_fc2" in name else factors.B
            whole = factors.B if split is factors.A else factors.A
            assert split.tensor_model_parallel  # type: ignore[union-attr]
            assert not getattr(whole, "tensor_model_parallel", False)
