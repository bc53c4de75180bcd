# SPDX-License-Identifier: Apache-2.0
"""Groups against a slow union-find, and the choice of the record to keep by hand."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindvl_data.curation.duplicates.groups import Groups, RecordTable, decisions, preference, record_name
from mindvl_data.curation.record import Record

QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # processors of CI are shared


@QUIET
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_groups_are_the_connected_components(blocks: list[bytes]) -> None:
    groups, names = Groups(20), list(range(20))
    for block in blocks:
        array = np.frombuffer(block[: len(block) // 2 * 2], np.uint8).reshape(-1, 2) % 20
        groups.join(array[:, 0], array[:, 1])
        for first, second in array.tolist():
            low, high = sorted((names[first], names[second]))
            names = [low if name == high else name for name in names]
    assert groups.roots(np.arange(20)).tolist() == names
    records, roots = groups.members()
    assert records.tolist() == [record for record in range(20) if names.count(names[record]) > 1]
    assert roots.tolist() == [names[record] for record in records]


class _Rows:
    """Four records, the second with two signatures and the fourth a piece of the third's number."""

    width, num_rows = 1, 5

    def blocks(self):  # type: ignore[no-untyped-def]
        yield np.array([7, 8], np.uint64), np.array([0, 0], np.uint32), np.array([[1], [2]], np.uint8)
        yield np.array([8, 1 << 32, 1 << 32], np.uint64), np.array([0, 0, 1], np.uint32), np.zeros((3, 1), np.uint8)


def test_signatures_of_one_record_share_its_index_across_blocks(tmp_path: Path) -> None:
    table = RecordTable(_Rows(), tmp_path)
    assert table.num_records == 4
    assert [records.tolist() for records, _ in table.blocks()] == [[0, 1], [1, 2, 3]]
    numbers, pieces = table.names(np.array([3, 1]))
    assert (numbers.tolist(), pieces.tolist()) == ([1 << 32, 8], [1, 0])


@pytest.mark.parametrize(
    ("values", "kept"),
    [([5.0, 5.0, 1.0, 9.0], 0), ([1.0, 5.0, 5.0, 9.0], 1), ([1.0, 2.0, 3.0, 0.0], 2)],
)
def test_the_greatest_preference_is_kept_then_the_lowest_record(values: list[float], kept: int, tmp_path: Path) -> None:
    table, groups = RecordTable(_Rows(), tmp_path), Groups(4)
    groups.join(np.array([0, 1]), np.array([2, 2]))
    preferences = iter([(np.array([0, 1], np.uint32), np.array(values[:2])), (np.array([1, 2, 3], np.uint32),
                        np.array([-100.0, *values[2:]]))])  # fmt: skip
    found = {(decision.number, decision.piece): decision for decision in
             decisions(groups, table, preferences, reason="same")}  # fmt: skip
    names = [(7, 0), (8, 0), (1 << 32, 0)]
    assert set(found) == set(names)  # the record (1 << 32, 1) is in no group
    keeper = found.pop(names[kept])
    group = record_name(*names[kept])
    assert keeper.drop is None
    assert keeper.facts == {"duplicate_group": group, "num_duplicates": 2}
    for decision in found.values():
        assert decision.drop is not None
        assert (decision.drop.reason, decision.drop.value) == ("same", f"same as {group}")
        assert decision.drop.facts == {"duplicate_group": group}


def test_a_record_is_named_by_part_position_and_piece() -> None:
    assert record_name((3 << 32) + 17, 0) == "3:17"
    assert record_name((3 << 32) + 17, 2) == "3:17.2"


def test_a_missing_fact_is_the_last_choice() -> None:
    record = Record(number=0, id="a", body={}, facts={"pixels": 12, "broken": float("nan")})
    assert preference(record, "") == 0.0
    assert preference(record, "pixels") == 12.0
    assert preference(record, "broken") == preference(record, "absent") == float("-inf")
