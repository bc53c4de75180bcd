# SPDX-License-Identifier: Apache-2.0
"""Quarantine log: a file by rank, a line for each bad use, each sample once when read."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mindvl_data import DataError
from mindvl_data.quarantine import FailedSample, QuarantineLog, read_quarantine

BAD = FailedSample(step=3, source="photos", shard="shard-000000.tar", sample_index=7, key="k", reason="truncated")


def record(path: Path, dp_rank: int, *bad: FailedSample) -> None:
    log = QuarantineLog(path, dp_rank=dp_rank)
    for one in bad:
        log.record(one)
    log.close()


def test_each_rank_appends_to_a_file_of_its_own_that_appears_with_the_first_bad_sample(tmp_path: Path) -> None:
    path = tmp_path / "run" / "quarantine.jsonl"
    record(path, 0)
    assert not path.parent.exists()
    record(path, 3, BAD)
    record(path, 3, replace(BAD, sample_index=8))
    (file,) = path.parent.iterdir()
    assert file.name == "quarantine.rank00003.jsonl"
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        asdict(BAD),
        asdict(BAD) | {"sample_index": 8},
    ]


def test_a_sample_counts_once_over_ranks_restarts_and_epochs(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    record(path, 0, BAD, replace(BAD, sample_index=8))
    record(path, 1, replace(BAD, step=9), replace(BAD, source="pages"))
    assert list(read_quarantine(path)) == [BAD, replace(BAD, sample_index=8), replace(BAD, source="pages")]


def test_logs_are_read_in_the_order_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "quarantine.jsonl"
    for rank in (2, 0, 1):
        record(path, rank, replace(BAD, sample_index=rank))
    listed = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: sorted(listed(self, pattern), reverse=True))
    assert [sample.sample_index for sample in read_quarantine(path)] == [0, 1, 2]


def test_a_line_cut_off_by_a_kill_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    record(path, 0, BAD)
    with open(tmp_path / "quarantine.rank00000.jsonl", "a") as file:
        file.write('{"step":4,"sou')
    record(path, 0, replace(BAD, sample_index=9))
    assert list(read_quarantine(path)) == [BAD, replace(BAD, sample_index=9)]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"quarantine log cannot be written: .*data\.quarantine_log"):
        record(tmp_path / "file" / "quarantine.jsonl", 0, BAD)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "quarantine.rank00000.jsonl").symlink_to("/dev/full")
    log = QuarantineLog(tmp_path / "quarantine.jsonl", dp_rank=0)
    for _ in range(2):
        with pytest.raises(DataError, match=r"rank00000\.jsonl: the quarantine log cannot be written: No space"):
            log.record(BAD)
    log.close()
