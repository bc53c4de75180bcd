# SPDX-License-Identifier: Apache-2.0
"""Layers of a pipeline's chunks, the length of packs, and layouts that cannot be."""

from dataclasses import replace

import pytest

from mindvl_model.errors import ModelError
from mindvl_model.layout import Layout, check_layout, chunk_layers
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen3_moe


def test_layers_are_spread_evenly_and_the_first_chunks_take_fewer() -> None:
    assert chunk_layers(36, Layout(pp_size=4)) == (9, 9, 9, 9)
    assert chunk_layers(61, Layout(pp_size=16)) == (3, 3, 3, *(4,) * 13)
    assert chunk_layers(7, Layout(pp_size=2, virtual_stages=2)) == (1, 2, 2, 2)
    assert chunk_layers(2, Layout(pp_size=3)) == (0, 1, 1)
    assert chunk_layers(2, Layout(pp_size=2, virtual_stages=2)) == (0, 0, 1, 1)


@pytest.mark.parametrize("sizes", [{"pp_size": 100}, {"pp_size": 6}, {"pp_size": 2, "virtual_stages": 1 << 20}])
def test_a_pipeline_stage_that_would_hold_nothing_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ModelError, match=r"pipeline stages of 4 language layers would hold nothing.*at most 4"):
        chunk_layers(4, Layout(**sizes))


def test_a_layout_may_say_how_many_layers_each_chunk_has() -> None:
    assert chunk_layers(36, Layout(pp_size=4, stage_layers=(3, 11, 11, 11))) == (3, 11, 11, 11)
    assert chunk_layers(4, Layout(pp_size=2, stage_layers=(0, 4))) == (0, 4)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((3, 11), r"stage_layers=\[3, 11\] has 2 entries, but pp_size=2 with virtual_stages=2 makes 4 chunks"),
        ((3, 11, 11, 10), r"stage_layers=\[3, 11, 11, 10\] add up to 35, but the language model has 36 layers"),
        ((-1, 13, 12, 12), r"stage_layers=\[-1, 13, 12, 12\] add up to 36, .* Give counts from 0 that add up to it"),
    ],
)
def test_counts_that_do_not_fit_are_refused_with_what_to_do(layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        chunk_layers(36, Layout(pp_size=2, virtual_stages=2, stage_layers=layers))


def test_fields_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ModelError, match="virtual_stages=2 with pp_size=1"):
        Layout(virtual_stages=2)
    with pytest.raises(ModelError, match='recompute_layers=3 with recompute="selective"'):
        Layout(recompute="selective", recompute_layers=3)


def test_a_pack_is_padded_to_equal_slices() -> None:
    assert Layout().padded_length(13) == 13
    assert Layout(cp_size=2).padded_length(13) == 14
    assert Layout(cp_size=2, tp_size=4).padded_length(13) == 16
    assert Layout(cp_size=2, tp_size=4).padded_length(16) == 16


def test_sizes_that_cannot_split_the_model_are_refused_by_name() -> None:
    config = smallest_config()  # 4 query heads in 2 groups, 2 heads in the vision encoder
    check_layout(config, Layout(tp_size=2, cp_size=2))
    with pytest.raises(ModelError, match=r"tp_size=1 times cp_size=3 cannot split language.num_heads=4"):
        check_layout(config, Layout(cp_size=3))
    with pytest.raises(ModelError, match=r"tp_size=2 times cp_size=4 cannot split language.num_heads=4"):
        check_layout(config, Layout(tp_size=2, cp_size=4))
    with pytest.raises(ModelError, match=r"tp_size=4 cannot split vision.num_heads=2. Layout. .* spread_images=True"):
        check_layout(config, Layout(tp_size=4))
    check_layout(config, Layout(tp_size=4, spread_images=True))
    with pytest.raises(ModelError, match=r"stage_layers=\[1, 2\] add up to 3"):
        check_layout(config, Layout(pp_size=2, stage_layers=(1, 2)))
    with pytest.raises(ModelError, match=r"ep_size=3 cannot split num_experts=8"):
        check_layout(smallest_qwen3_moe(), Layout(ep_size=3))
    with pytest.raises(ModelError, match=r"tp_size=2 cannot split language.expert_ffn_hidden_size .*shared_experts=13"):
        check_layout(smallest_deepseek_v3(expert_ffn_hidden_size=13), Layout(tp_size=2))


def test_key_value_heads_may_be_fewer_than_ranks_but_not_lie_across_them() -> None:
    grouped = replace(smallest_config(), language=replace(smallest_config().language, num_heads=12, num_kv_heads=3))
    with pytest.raises(ModelError, match=r"tp_size=2 cannot split language.num_kv_heads=3"):
        check_layout(grouped, Layout(tp_size=2))
    check_layout(grouped, Layout(cp_size=2))
