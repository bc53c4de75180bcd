# SPDX-License-Identifier: Apache-2.0
"""Blocks, packed sequences and process groups on megatron-core."""

from collections.abc import Callable
from typing import Any

import torch

from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3
from mindvl_ops import Segments


def test_a_layer_uses_its_own_segments_or_those_of_the_pack() -> None:
    from mindvl_model.megatron.packing import PackedSequence

    windows, full = Segments([4, 4]), Segments([8])
    pack = PackedSequence(segments=windows, segments_by_layer={2: full})
    assert pack.of_layer(1) is windows
    assert pack.of_layer(2) is full
    assert pack.qkv_format == "sbhd"


def test_existing_process_groups_are_reused_and_not_destroyed() -> None:
    from megatron.core import parallel_state

    from mindvl_model.megatron.process import single_process

    with single_process():  # inside the groups of the whole test session
        pass
    assert parallel_state.model_parallel_is_initialized()


def test_a_block_uses_the_segments_and_angles_of_its_pack() -> None:
    """A layer with window attention does not mix segments; the following layer with full attention does."""
    from mindvl_model.megatron.blocks import BuildConfig, PackedSequence, build_vision_block, transformer_config
    from mindvl_model.testing.tiny import randomize
    from mindvl_model.vision.entries import VISION_ENTRIES

    config = transformer_config(
        BuildConfig(), num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=24, add_bias_linear=True
    )
    block = build_vision_block(config, VISION_ENTRIES["qwen2_5_vl"])
    randomize(block)
    hidden = torch.randn(8, 1, 16, generator=torch.Generator().manual_seed(0))
    changed = hidden.clone()
    changed[5:] += 1.0
    cos, sin = torch.ones(8, 8), torch.zeros(8, 8)
    for by_layer, leaks in (({}, False), ({2: Segments([8])}, True)):
        pack = PackedSequence(segments=Segments([4, 4]), segments_by_layer=by_layer, cos=cos, sin=sin)
        before, after = block(hidden, None, packed_seq_params=pack), block(changed, None, packed_seq_params=pack)
        assert torch.equal(before[:4], after[:4]) != leaks


def test_gradients_of_replicated_parts_are_summed_and_counted_once() -> None:
    """With spread images, tensor-parallel ranks encode different images with the same weights."""
    from mindvl_model.model import MindVLModel
    from mindvl_model.parallel_config import BuildConfig, ParallelConfig

    model = MindVLModel(smallest_config(), BuildConfig(parallel=ParallelConfig(spread_images=True)))
    for name, parameter in model.named_parameters():
        if not name.startswith("language."):
            assert parameter.sequence_parallel, name
            assert not parameter.tensor_model_parallel, name
    usual = MindVLModel(smallest_config(), BuildConfig())
    sharded = [one.sharded_state_dict(metadata={"dp_cp_group": None}) for one in (model, usual)]
    assert sharded[0].keys() == sharded[1].keys()


def test_weights_that_are_split_over_ranks_say_so_and_copies_do_not(make_model: Callable[..., Any]) -> None:
    """megatron-core counts weights without the attribute on the first rank only in the gradient norm."""
    for config in (smallest_config(), smallest_deepseek_v3(), smallest_deepseek_v3(q_lora_rank=None)):
        for name, parameter in make_model(config).named_parameters():
            piece, kind = name.split(".")[-2:]
            split_rows = piece in ("linear_fc1", "fc1", "linear_qkv", "linear_kv_up_proj")
            split_rows = split_rows or piece in ("linear_q_proj", "linear_q_up_proj")
            split_columns = piece in ("linear_fc2", "fc2", "linear_proj") and kind == "weight"
            expected = split_rows or split_columns or piece in ("word_embeddings", "output_layer")
            assert getattr(parameter, "tensor_model_parallel", False) == expected, name
