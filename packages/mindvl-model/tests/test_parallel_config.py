# SPDX-License-Identifier: Apache-2.0
"""Layers of a pipeline's chunks, the length of packs, and impossible layouts."""

from dataclasses import replace

import pytest

from mindvl_model.errors import ModelError
from mindvl_model.parallel_config import (
    ParallelConfig,
    RecomputeConfig,
    check_parallel,
    chunk_layers,
    even_rows,
    expert_blocks,
)
from mindvl_model.sizes import named_config
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen3_moe


def test_layers_are_spread_evenly_and_the_first_chunks_take_fewer() -> None:
    assert chunk_layers(36, ParallelConfig(pp_size=4)) == (9, 9, 9, 9)
    assert chunk_layers(61, ParallelConfig(pp_size=16)) == (3, 3, 3, *(4,) * 13)
    assert chunk_layers(7, ParallelConfig(pp_size=2, virtual_stages=2)) == (1, 2, 2, 2)
    assert chunk_layers(2, ParallelConfig(pp_size=3)) == (0, 1, 1)
    assert chunk_layers(2, ParallelConfig(pp_size=2, virtual_stages=2)) == (0, 0, 1, 1)


@pytest.mark.parametrize("sizes", [{"pp_size": 100}, {"pp_size": 6}, {"pp_size": 2, "virtual_stages": 1 << 20}])
def test_a_pipeline_stage_that_would_hold_nothing_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ModelError, match=r"pipeline stages without any of the 4 language layers.*at most 4"):
        chunk_layers(4, ParallelConfig(**sizes))


def test_a_layout_may_say_how_many_layers_each_chunk_has() -> None:
    assert chunk_layers(36, ParallelConfig(pp_size=4, stage_layers=(3, 11, 11, 11))) == (3, 11, 11, 11)
    assert chunk_layers(4, ParallelConfig(pp_size=2, stage_layers=(0, 4))) == (0, 4)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((3, 11), r"stage_layers: must have pp_size \* virtual_stages = 4 entries, got 2"),
        ((3, 11, 11, 10), r"stage_layers: \[3, 11, 11, 10\] add up to 35, but the language model has 36 layers"),
        ((-1, 13, 12, 12), r"stage_layers: must be layer counts >= 0, got \[-1, 13, 12, 12\]"),
    ],
)
def test_counts_that_do_not_fit_are_refused_with_what_to_do(layers: tuple[int, ...], message: str) -> None:
    with pytest.raises((ModelError, ValueError), match=message):
        chunk_layers(36, ParallelConfig(pp_size=2, virtual_stages=2, stage_layers=layers))


def test_fields_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"virtual_stages: 2 virtual stages require pp_size >= 2, got pp_size=1"):
        ParallelConfig(virtual_stages=2)
    with pytest.raises(ValueError, match="layers: requires kind: full, got kind: selective"):
        RecomputeConfig(kind="selective", layers=3)


def test_a_pack_is_padded_to_equal_slices() -> None:
    assert ParallelConfig().padded_length(13) == 13
    assert ParallelConfig(cp_size=2).padded_length(13) == 14
    assert ParallelConfig(cp_size=2, tp_size=4).padded_length(13) == 16
    assert ParallelConfig(cp_size=2, tp_size=4).padded_length(16) == 16


def test_sizes_that_cannot_split_the_model_are_refused_by_name() -> None:
    config = smallest_config()  # 4 query heads in 2 groups, 2 heads in the vision encoder
    check_parallel(config, ParallelConfig(tp_size=2, cp_size=2))
    with pytest.raises(ModelError, match=r"tp_size=1 \* cp_size=3 = 3 does not divide language.num_heads=4"):
        check_parallel(config, ParallelConfig(cp_size=3))
    with pytest.raises(ModelError, match=r"tp_size=2 \* cp_size=4 = 8 does not divide language.num_heads=4"):
        check_parallel(config, ParallelConfig(tp_size=2, cp_size=4))
    with pytest.raises(ModelError, match=r"tp_size: 4 does not divide vision.num_heads=2. .* spread_images: true"):
        check_parallel(config, ParallelConfig(tp_size=4))
    check_parallel(config, ParallelConfig(tp_size=4, spread_images=True))
    with pytest.raises(ModelError, match=r"stage_layers: \[1, 2\] add up to 3"):
        check_parallel(config, ParallelConfig(pp_size=2, stage_layers=(1, 2)))
    with pytest.raises(ModelError, match=r"ep_size: 2, but the model has no experts"):
        check_parallel(config, ParallelConfig(ep_size=2))
    tied = smallest_deepseek_v3(tie_embeddings=True, num_mtp_layers=1)
    with pytest.raises(ModelError, match=r"pp_size: 2 with tied embeddings and num_mtp_layers=1"):
        check_parallel(tied, ParallelConfig(pp_size=2))
    with pytest.raises(ModelError, match=r"ep_size: 3 does not divide num_experts=8"):
        check_parallel(smallest_qwen3_moe(), ParallelConfig(ep_size=3))
    with pytest.raises(
        ModelError, match=r"tp_size: 2 does not divide language.expert_ffn_hidden_size .*shared_experts=13"
    ):
        check_parallel(smallest_deepseek_v3(expert_ffn_hidden_size=13), ParallelConfig(tp_size=2))


def test_key_value_heads_may_be_fewer_than_ranks_but_not_lie_across_them() -> None:
    language = smallest_config().language
    attention = replace(language.attention, num_kv_heads=3)
    grouped = replace(smallest_config(), language=replace(language, num_heads=12, attention=attention))
    with pytest.raises(ModelError, match=r"tp_size: 2 is neither a divisor nor a multiple of language.num_kv_heads=3"):
        check_parallel(grouped, ParallelConfig(tp_size=2))
    check_parallel(grouped, ParallelConfig(cp_size=2))


def test_expert_messages_have_room_for_a_multiple_of_the_even_rows() -> None:
    """8 of 256 experts on 128 ranks, 4,096 tokens on each rank: 256 rows are even, two experts take at most 8,192."""
    experts = named_config("mindvl-671b-a37b").language.experts
    assert experts is not None
    layout = ParallelConfig(tp_size=2, ep_size=128, expert_capacity_factor=1.5)
    assert even_rows(experts, layout, 8192) == 256
    found = expert_blocks(experts, layout, 8192)
    assert found is not None
    assert (found.rows, found.most_rows, found.can_overflow) == (384, 8192, True)
    large = expert_blocks(experts, replace(layout, expert_capacity_factor=128), 8192)
    assert large is not None
    assert (large.rows, large.can_overflow) == (8192, False)


def test_the_padding_of_expert_messages_is_a_number_of_whole_tokens() -> None:
    published = named_config("mindvl-671b-a37b").language.experts
    experts = replace(published, num_experts=8, experts_per_token=3, num_expert_groups=1, groups_per_token=1)
    for ep_size in (2, 4, 8):
        layout = ParallelConfig(ep_size=ep_size, expert_capacity_factor=1.3)
        for seq_length in range(1, 40):
            blocks = expert_blocks(experts, layout, seq_length)
            assert blocks is not None
            assert blocks.rows >= 1.3 * even_rows(experts, layout, seq_length) or not blocks.can_overflow
            assert (ep_size * blocks.rows - seq_length * 3) % 3 == 0


def test_messages_have_exact_sizes_by_default_and_without_other_ranks() -> None:
    experts = named_config("mindvl-671b-a37b").language.experts
    assert expert_blocks(experts, ParallelConfig(ep_size=8), 8192) is None
    assert expert_blocks(experts, ParallelConfig(expert_capacity_factor=2), 8192) is None
    assert expert_blocks(None, ParallelConfig(ep_size=8, expert_capacity_factor=2), 8192) is None


@pytest.mark.parametrize("factor", [0, 0.99, -1, float("nan"), float("inf")])
def test_a_capacity_that_is_too_small_for_even_rows_is_refused(factor: float) -> None:
    with pytest.raises(
        ValueError, match=r"expert_capacity_factor: must be between 1 and 1,048,576, got .* null for exact"
    ):
        ParallelConfig(expert_capacity_factor=factor)
