# SPDX-License-Identifier: Apache-2.0
"""Blocks of a fixed number of rows: complete, in order, in range also if they overflow, and without a host wait."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_model.megatron.expert_messages import ExpertMessages, count
from mindvl_model.parallel_config import ExpertBlocks

NUM_EXPERTS, EP, CHOSEN = 6, 3, 2
LOCAL = NUM_EXPERTS // EP


def messages_of(rows: int | None, most_rows: int = 100) -> ExpertMessages:
    blocks = None if rows is None else ExpertBlocks(rows=rows, most_rows=most_rows)
    return ExpertMessages(NUM_EXPERTS, EP, 4.0, blocks)


@settings(deadline=None, max_examples=60)
@given(num_tokens=st.integers(0, 12), more=st.integers(0, 5), seed=st.integers(0, 1000))
def test_every_block_has_the_rows_of_its_rank_by_expert_and_then_padding(num_tokens: int, more: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :CHOSEN]
    tokens, weights = torch.arange(1.0, num_tokens + 1)[:, None], torch.rand(num_tokens, CHOSEN, generator=generator)
    by_rank = [int((experts // LOCAL == rank).sum()) for rank in range(EP)]
    rows = (max(by_rank) + more + 1) // CHOSEN * CHOSEN  # the padding must be whole tokens
    messages = messages_of(rows)
    padded, padded_weights, places, counts = messages.padded(tokens, weights, experts)
    assert places.shape == padded_weights.shape == (EP * rows // CHOSEN, CHOSEN)
    assert counts.sum(dim=1).tolist() == [rows] * EP
    assert counts[:, -1].tolist() == [rows - used for used in by_rank]
    assert not padded[num_tokens:].any()
    assert not padded_weights[num_tokens:].any()
    assert torch.equal(padded_weights[:num_tokens], weights)
    order = places.flatten().argsort(stable=True)
    sent = padded[order // CHOSEN, 0].view(EP, rows).tolist()
    for rank, block in enumerate(sent):
        expected = [
            float(token + 1)
            for expert in range(rank * LOCAL, (rank + 1) * LOCAL)
            for token in range(num_tokens)
            if expert in experts[token]
        ]
        assert block == expected + [0.0] * (rows - len(expected))
    overflow = messages.overflow()
    assert overflow is not None
    assert not overflow


@settings(deadline=None, max_examples=60)
@given(experts=st.lists(st.sampled_from([[0, 1], [1, 0], [2, 5], [4, 3]]), min_size=4, max_size=9))
def test_an_overflow_raises_the_flag_and_all_numbers_stay_in_range(experts: list[list[int]]) -> None:
    rows = 6
    chosen = torch.tensor(experts)
    messages = messages_of(rows)
    _, _, places, counts = messages.padded(torch.ones(len(experts), 3), torch.ones(chosen.shape), chosen)
    assert 0 <= int(places.min()) <= int(places.max()) < EP * (LOCAL + 1)
    assert places.numel() == EP * rows
    assert counts.sum(dim=1).tolist() == [rows] * EP
    assert int(counts.min()) >= 0
    largest = max(int((chosen // LOCAL == rank).sum()) for rank in range(EP))
    assert bool(messages.overflow()) == (largest > rows)
    assert float(messages.take_factor(torch.device("cpu"))) == largest / 4


def test_a_pack_that_is_longer_than_the_blocks_allow_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="longer than the blocks of 2 rows"):
        messages_of(2).padded(torch.ones(4, 1), torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.int64))


def test_the_largest_message_of_several_layers_counts_until_it_is_taken() -> None:
    messages = messages_of(6)
    assert messages.overflow() is None
    for experts in ([[0, 1]] * 3, [[0, 2]] * 3):
        messages.padded(torch.ones(3, 1), torch.ones(3, 2), torch.tensor(experts))
    assert float(messages.take_factor(torch.device("cpu"))) == 6 / 4
    assert float(messages.take_factor(torch.device("cpu"))) == 0
    messages.padded(torch.ones(3, 1), torch.ones(3, 2), torch.tensor([[0, 1]] * 3))
    messages.discard()
    messages.note_exact([1, 3, 2])
    messages.note_exact([2, 0, 2])
    assert float(messages.take_factor(torch.device("cpu"))) == 3 / 4


def test_blocks_that_are_always_large_enough_need_no_flag() -> None:
    messages = messages_of(6, most_rows=6)
    messages.padded(torch.ones(3, 1), torch.ones(3, 2), torch.tensor([[0, 1]] * 3))
    assert messages.overflow() is None
    assert messages_of(None).is_exact


def test_the_host_waits_for_nothing() -> None:
    """On "meta" reading a value is an error."""
    with torch.device("meta"):
        messages = messages_of(6)
        tokens, weights, experts = torch.ones(4, 3), torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.int64)
        padded, _, places, counts = messages.padded(tokens, weights, experts)
        assert (padded.shape, places.shape, counts.shape) == ((9, 3), (9, 2), (3, 3))
        assert messages.overflow() is not None
        assert messages.take_factor(tokens.device).shape == ()


def test_rows_are_counted_by_place() -> None:
    assert count(torch.tensor([[0, 3], [3, 1]], dtype=torch.int32), 5).tolist() == [1, 1, 0, 2, 0]
