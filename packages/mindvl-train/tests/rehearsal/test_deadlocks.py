# SPDX-License-Identifier: Apache-2.0
"""Deadlocks: cycles over several groups are found, and orders that a device can run pass."""

import pytest

from mindvl_train.rehearsal.deadlocks import find_deadlock
from mindvl_train.rehearsal.matching import find_mismatches


def judge(found):
    """The deadlock of a world whose sequences agree."""
    assert find_mismatches(found) == []
    return find_deadlock(found)


def test_two_groups_in_opposite_order_are_a_deadlock_with_both_source_lines(world, collective):
    tp = collective("all_reduce", "tp", source="mindvl_model/a.py:1")
    dp = collective("all_gather", "dp", source="mindvl_model/b.py:2")
    groups = {"tp": [0, 1], "dp": [0, 1]}
    assert judge(world({0: [tp, dp], 1: [tp, dp]}, groups)) is None
    found = judge(world({0: [tp, dp], 1: [dp, tp]}, groups))
    assert [(each.rank, each.message.source, each.waits_for) for each in found.cycle] == [
        (0, "mindvl_model/a.py:1", 1),
        (1, "mindvl_model/b.py:2", 0),
    ]
    assert str(found) == (
        "deadlock of 2 ranks: rank 0 waits in its message 0, all_reduce of bfloat16 [4, 8] at mindvl_model/a.py:1, for "
        "rank 1; rank 1 waits in its message 0, all_gather of bfloat16 [4, 8] at mindvl_model/b.py:2, for rank 0."
    )


def test_a_cycle_over_three_ranks_and_groups_is_found(world, collective):
    """Every group has two of three ranks, and every rank enters its groups in the order of a ring."""
    groups = {"a": [0, 1], "b": [1, 2], "c": [2, 0]}
    a, b, c = (collective("all_reduce", name) for name in "abc")
    found = judge(world({0: [a, c], 1: [b, a], 2: [c, b]}, groups))
    assert sorted(each.rank for each in found.cycle) == [0, 1, 2]
    assert judge(world({0: [a, c], 1: [a, b], 2: [c, b]}, groups)) is None


def test_an_asynchronous_message_holds_a_rank_only_at_its_wait(world, collective):
    tp, dp = collective("all_reduce", "tp"), collective("all_gather", "dp")
    groups = {"tp": [0, 1], "dp": [0, 1]}
    later = collective("all_gather", "dp", is_async=True, waited_at=2)
    assert judge(world({0: [tp, dp], 1: [later, tp]}, groups)) is None
    at_once = collective("all_gather", "dp", is_async=True, waited_at=1)
    assert judge(world({0: [tp, dp], 1: [at_once, tp]}, groups)) is not None


def test_messages_of_one_group_run_in_their_order(world, collective):
    """Rank 1 awaits the second message of group a only, but that runs after the first, which needs rank 0 to continue."""
    first, second = collective("all_reduce", "a", is_async=True), collective("all_gather", "a")
    b = collective("broadcast", "b", peer=0)
    groups = {"a": [0, 1], "b": [0, 1]}
    found = judge(world({0: [b, first, second], 1: [first, second, b]}, groups))
    assert [each.message.kind for each in found.cycle] == ["broadcast", "all_reduce"]


def test_two_sends_towards_each_other_block_unless_they_are_a_batch(world, collective):
    def exchange(peer, batch):
        return [
            collective("send", "pp", peer=peer, batch=batch, waited_at=2),
            collective("recv", "pp", peer=peer, batch=batch, waited_at=2),
        ]

    groups = {"pp": [0, 1]}
    assert judge(world({0: exchange(1, None), 1: exchange(0, None)}, groups)) is not None
    assert judge(world({0: exchange(1, 0), 1: exchange(0, 0)}, groups)) is None
    assert judge(world({0: exchange(1, None), 1: exchange(0, None)[::-1]}, groups)) is None


def test_messages_between_other_ranks_do_not_hold_a_send(world, collective):
    """Rank 1 waits for rank 2 first; its receive from rank 0 was issued before, on a communicator of its own."""
    logs = {
        0: [collective("send", "pp", peer=1, waited_at=1), collective("all_reduce", "tp")],
        1: [collective("recv", "pp", peer=2, waited_at=2), collective("recv", "pp", peer=0, waited_at=2)],
        2: [collective("all_reduce", "tp"), collective("send", "pp", peer=1, waited_at=2)],
    }
    assert judge(world(logs, {"pp": [0, 1, 2], "tp": [0, 2]})) is None


def test_ranks_that_were_not_rehearsed_move_with_their_class(world, collective):
    """Ranks 0 and 1 are one class, 2 and 3 the other; each sends first, so that no receive is reached."""
    first = [collective("send", "pp", peer=2, waited_at=1), collective("recv", "pp", peer=2, waited_at=2)]
    second = [collective("send", "pp", peer=0, waited_at=1), collective("recv", "pp", peer=0, waited_at=2)]
    pp = {"pp": [0, 1, 2, 3]}
    classes = [[0, 1], [2, 3]]
    assert judge(world({0: first, 2: second}, pp, classes)) is not None
    swapped = [collective("recv", "pp", peer=0, waited_at=1), collective("send", "pp", peer=0, waited_at=2)]
    assert judge(world({0: first, 2: swapped}, pp, classes)) is None


def test_ranks_without_a_record_are_always_ready(world, collective):
    assert judge(world({0: [collective("all_reduce", "tp")]}, {"tp": [0, 1]})) is None


def one_forward_one_backward(collective, rank, *, size, microbatches, fused=True):
    """Messages of megatron-core's schedule without virtual stages; `fused`: send and receive in one batch."""
    log = []

    def exchange(*halves):
        batch = len(log)
        halves = [(kind, peer) for kind, peer in halves if 0 <= peer < size]
        for number, (kind, peer) in enumerate(halves):
            wait = batch + len(halves) if fused else batch + number + 1
            log.append(collective(kind, "pp", peer=peer, batch=batch if fused else None, waited_at=wait))

    before, after = rank - 1, rank + 1
    warmup = min(microbatches, size - rank - 1)
    for _ in range(warmup):
        exchange(("recv", before))
        exchange(("send", after))
    if microbatches > warmup:
        exchange(("recv", before))
    for number in range(microbatches - warmup):
        exchange(("send", after), ("recv", after))
        is_last = number == microbatches - warmup - 1
        exchange(("send", before), *([] if is_last else [("recv", before)]))
    for _ in range(warmup):
        exchange(("recv", after))
        exchange(("send", before))
    return log


@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_a_pipeline_of_four_ranks_runs(world, collective, microbatches):
    logs = {rank: one_forward_one_backward(collective, rank, size=4, microbatches=microbatches) for rank in range(4)}
    assert judge(world(logs, {"pp": [0, 1, 2, 3]})) is None


def test_the_same_pipeline_without_batches_is_a_deadlock(world, collective):
    logs = {rank: one_forward_one_backward(collective, rank, size=4, microbatches=4, fused=False) for rank in range(4)}
    found = judge(world(logs, {"pp": [0, 1, 2, 3]}))
    assert {each.message.kind for each in found.cycle} == {"send"}
