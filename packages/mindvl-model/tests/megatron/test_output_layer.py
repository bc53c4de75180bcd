# SPDX-License-Identifier: Apache-2.0
"""The output layer computes the tokens that have a label; losses over several ranks are compared in test_layouts.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3
from mindvl_ops import Segments

CONFIG = smallest_config()


def pack_of(*positions: int, lengths: tuple[int, ...], cp_rank: int = 0, cp_size: int = 1) -> Any:
    from mindvl_model.megatron.packing import PackedSequence

    return PackedSequence(
        segments=Segments(lengths), loss_positions=torch.tensor(positions), cp_rank=cp_rank, cp_size=cp_size
    )


def test_the_number_of_rows_is_a_multiple_of_sixteen_and_never_zero() -> None:
    from mindvl_model.megatron.output_layer import num_loss_rows

    assert num_loss_rows(pack_of(*range(17), lengths=(60, 40))) == 32
    assert num_loss_rows(pack_of(*range(16), lengths=(60, 40))) == 16
    assert num_loss_rows(pack_of(lengths=(60, 40))) == 16


def test_all_tokens_are_computed_where_nothing_would_be_saved() -> None:
    from mindvl_model.megatron.output_layer import num_loss_rows
    from mindvl_model.megatron.packing import PackedSequence

    assert num_loss_rows(pack_of(*range(90), lengths=(60, 36))) is None
    assert num_loss_rows(pack_of(3, lengths=(16,))) is None
    assert num_loss_rows(PackedSequence(segments=Segments((60, 40)))) is None


def test_each_context_parallel_rank_computes_its_own_slice() -> None:
    from mindvl_model.megatron.output_layer import num_loss_rows

    positions = (*range(40, 57), 99)  # 10 of them before position 50
    slices = [num_loss_rows(pack_of(*positions, lengths=(60, 40), cp_rank=rank, cp_size=2)) for rank in range(2)]
    assert slices == [16, 16]
    positions = (*range(30, 49), 99)  # 19 before position 50
    slices = [num_loss_rows(pack_of(*positions, lengths=(60, 40), cp_rank=rank, cp_size=2)) for rank in range(2)]
    assert slices == [32, 16]


def test_labels_that_a_shift_moves_out_of_their_segment_are_not_counted() -> None:
    from mindvl_model.megatron.output_layer import num_loss_rows

    positions = (*range(17), 60)
    assert num_loss_rows(pack_of(*positions, lengths=(60, 0, 40)), 0) == 32
    assert num_loss_rows(pack_of(*positions, lengths=(60, 0, 40)), 1) == 16  # positions 0 and 60 have no token before
    assert num_loss_rows(pack_of(*positions, 70, lengths=(60, 0, 40)), 1) == 32


@pytest.mark.parametrize("kind", [None, "selective", "full"])
@pytest.mark.parametrize("config", [CONFIG, smallest_config(tie_embeddings=True), smallest_deepseek_v3()])
def test_loss_and_gradients_are_those_of_all_tokens(make_model: Callable[..., Any], config: Any, kind: Any) -> None:
    pack = pack_segments([random_segment(config, num_text=length, seed=length) for length in (40, 9, 31)], padding=20)
    everything = {**pack, "loss_positions": None}
    whole = make_model(config)
    some = make_model(config)
    if kind is not None:  # as BuildConfig.recompute sets them
        shared = some.language.config
        shared.recompute_granularity, shared.recompute_method, shared.recompute_num_layers = kind, "block", 1
    expected, loss = whole(**everything), some(**pack)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    expected.backward()
    loss.backward()
    expected_gradients = dict(whole.named_parameters())
    for name, parameter in some.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_gradients[name].grad, rtol=1e-4, atol=1e-5)
    for one, other in zip(whole.take_segment_losses(), some.take_segment_losses(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_a_kept_logit_saves_the_products_of_tokens_without_a_label(make_model: Callable[..., Any]) -> None:
    model, pack = make_model(CONFIG), pack_segments([random_segment(CONFIG, num_text=100)])
    num_tokens, rows = 100, -(-len(pack["loss_positions"]) // 16) * 16

    def flops(**more: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            model(**{**pack, **more}).backward()
        return counter.get_total_flops()

    saved = flops(loss_positions=None) - flops()
    assert rows < num_tokens
    assert saved == 3 * 2 * (num_tokens - rows) * CONFIG.language.hidden_size * CONFIG.language.vocab_size


def test_positions_that_do_not_match_the_labels_are_refused(make_model: Callable[..., Any]) -> None:
    pack = pack_segments([random_segment(CONFIG, num_text=40)])
    pack["loss_positions"] = pack["loss_positions"][1:]
    with pytest.raises(AssertionError, match="loss_positions"):
        make_model(CONFIG)(**pack)
