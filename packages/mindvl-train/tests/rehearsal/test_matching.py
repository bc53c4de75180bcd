# SPDX-License-Identifier: Apache-2.0
"""Matching: a planted difference between two ranks is found and named, and equal sequences pass."""

from dataclasses import replace

import pytest

from mindvl_train.rehearsal.matching import find_mismatches


@pytest.fixture
def three(collective):
    """A gather, a reduction and a scatter, as one rank issues them."""
    return [
        collective("all_gather", "tp"),
        collective("all_reduce", "tp", shape=(2, 2)),
        collective("reduce_scatter", "tp", shape=(8, 8)),
    ]


def test_equal_sequences_match(world, three):
    assert find_mismatches(world({0: three, 1: three}, {"tp": [0, 1]})) == []


def test_a_rank_that_skips_an_all_reduce_is_named_with_its_source_line(world, three):
    skipping = [three[0], replace(three[2], source="mindvl_model/megatron/mla.py:7")]
    (found,) = find_mismatches(world({0: three, 1: skipping}, {"tp": [0, 1]}))
    assert (found.position, found.reason) == (1, "kind")
    assert str(found) == (
        "tp of ranks 0, 1: message 1 differs in kind: rank 0 issues all_reduce of bfloat16 [2, 2] at "
        "mindvl_train/step.py:1 (its message 1), but rank 1 issues reduce_scatter of bfloat16 [8, 8] at "
        "mindvl_model/megatron/mla.py:7 (its message 1)."
    )


def test_a_rank_that_skips_the_last_message_is_named(world, three):
    (found,) = find_mismatches(world({0: three, 1: three[:2]}, {"tp": [0, 1]}))
    assert (found.position, found.reason) == (2, "number of messages")
    assert str(found).endswith("but rank 1 has no further message.")


def test_another_order_is_found_at_its_first_message(world, three):
    (found,) = find_mismatches(world({0: three, 1: three[::-1]}, {"tp": [0, 1]}))
    assert (found.position, found.reason) == (0, "kind")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shapes": ((2, 3),)}, "shape"),
        ({"shapes": ((4,),)}, "shape"),
        ({"dtype": "float32"}, "data type"),
        ({"kind": "broadcast", "peer": 0}, "kind"),
    ],
)
def test_another_shape_type_or_kind_is_found(world, three, change, reason):
    changed = [three[0], replace(three[1], **change), three[2]]
    (found,) = find_mismatches(world({0: three, 1: changed}, {"tp": [0, 1]}))
    assert (found.position, found.reason) == (1, reason)


def test_another_root_of_a_broadcast_is_found(world, collective):
    logs = {rank: [collective("broadcast", "tp", peer=rank)] for rank in (0, 1)}
    assert [found.reason for found in find_mismatches(world(logs, {"tp": [0, 1]}))] == ["root"]


def test_every_rank_that_disagrees_is_named(world, three):
    found = find_mismatches(world({0: three, 1: three, 2: three[:1]}, {"tp": [0, 1, 2]}))
    assert {tuple(side.rank for side in each.sides) for each in found} == {(0, 2), (1, 2)}


def test_all_to_all_with_unequal_rows_matches_when_sent_and_received_rows_agree(world, collective):
    first = collective("all_to_all", "ep", shape=(5, 8), splits=((2, 3), (2, 4)))
    second = collective("all_to_all", "ep", shape=(8, 8), splits=((4, 4), (3, 4)))
    assert find_mismatches(world({0: [first], 1: [second]}, {"ep": [0, 1]})) == []
    wrong = replace(second, splits=((4, 4), (2, 4)))
    (found,) = find_mismatches(world({0: [first], 1: [wrong]}, {"ep": [0, 1]}))
    assert found.reason == "rows of all_to_all"


def test_a_send_meets_its_receive_in_any_order_of_opposite_directions(world, collective):
    first = [collective("send", "pp", peer=1), collective("recv", "pp", peer=1, shape=(2, 2))]
    second = [collective("send", "pp", peer=0, shape=(2, 2)), collective("recv", "pp", peer=0)]
    assert find_mismatches(world({0: first, 1: second}, {"pp": [0, 1]})) == []


def test_members_of_a_batch_have_no_order_among_themselves(world, collective):
    first = [collective("recv", "pp", peer=1, batch=0), collective("send", "pp", peer=1, batch=0)]
    second = [collective("recv", "pp", peer=0, batch=4), collective("send", "pp", peer=0, batch=4)]
    assert find_mismatches(world({0: first, 1: second}, {"pp": [0, 1]})) == []


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        ({"kind": "recv", "peer": 0, "shape": (2, 16)}, "shape"),
        ({"kind": "recv", "peer": 0, "dtype": "float32"}, "data type"),
        ({"kind": "recv", "peer": 0, "batch": 1}, "batching"),
        ({"kind": "send", "peer": 0}, "number of messages"),
    ],
)
def test_a_send_without_an_equal_receive_is_found(world, collective, theirs, reason):
    logs = {0: [collective("send", "pp", peer=1)], 1: [collective(group="pp", **theirs)]}
    assert reason in {found.reason for found in find_mismatches(world(logs, {"pp": [0, 1]}))}


def test_a_receive_without_any_send_is_found(world, collective):
    (found,) = find_mismatches(world({0: [], 1: [collective("recv", "pp", peer=0)]}, {"pp": [0, 1]}))
    assert [side.rank for side in found.sides] == [1, 0]


def test_the_rehearsed_rank_of_a_class_stands_for_the_others(world, collective):
    """Ranks 0 and 1 are stage 0, ranks 2 and 3 are stage 1; rank 1 was rehearsed instead of rank 0."""
    sends = [collective("send", "world", peer=3), collective("all_reduce", "all")]
    receives = [collective("recv", "world", peer=0), collective("all_reduce", "all")]
    groups = {"world": [0, 1, 2, 3], "all": [0, 1, 2, 3]}
    classes = [[0, 1], [2, 3]]
    assert find_mismatches(world({1: sends, 2: receives}, groups, classes)) == []
    (found,) = find_mismatches(world({1: sends, 2: receives[:1]}, groups, classes))
    assert [side.rank for side in found.sides] == [1, 2]


def test_a_rank_without_a_rehearsed_class_is_not_compared(world, collective):
    assert find_mismatches(world({0: [collective("send", "pp", peer=1)]}, {"pp": [0, 1]})) == []


def test_two_groups_of_one_name_are_distinguished(world, three):
    groups = {"tp/a": [0, 1], "tp/b": [0, 1]}
    first = [replace(three[0], group="tp/a"), replace(three[1], group="tp/b")]
    assert find_mismatches(world({0: first, 1: first[::-1]}, groups)) == []
