# SPDX-License-Identifier: Apache-2.0
"""Lines of an audit log: what a kill cut off is passed over, what no loader wrote is named by file and line."""

import json
from pathlib import Path
from typing import Any

import pytest

from mindvl_data import DataError
from mindvl_data.audit_lines import read_log

STEP: dict[str, Any] = {"step": 1, "packs": [[["a", 0, "s", 3]]], "tokens": {"a": 5}, "when": "2026-01-01T00:00:00Z"}


def test_a_cut_off_line_is_not_read_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    line = '{"step":1,"packs":[],"tokens":{},"when":"2026-01-01T00:00:00Z"}\n'
    log.write_text(line + '{"step":2,"packs":[[["pic')
    assert [one.step for one in read_log(log)] == [1]
    log.write_text(line + '{"step":2,"packs":[[["pic\n')
    with pytest.raises(DataError, match=r"audit\.jsonl:2: the line of the audit log is damaged"):
        list(read_log(log))
    with pytest.raises(DataError, match="the audit log does not exist"):
        list(read_log(tmp_path / "nothing.jsonl"))


@pytest.mark.parametrize(
    "changed",
    [
        {"packs": None}, {"packs": [None]}, {"packs": [[["a", 0, "s"]]]}, {"packs": [[["a", -1, "s", 3]]]},
        {"packs": [[["a", 0, "s", 10**40]]]}, {"packs": [[[["a"], 0, "s", 3]]]}, {"packs": [[["a", True, "s", 3]]]},
        {"tokens": []}, {"tokens": {"a": -5}}, {"tokens": {"a": "5"}}, {"tokens": {"a": 1e300}}, {"when": None},
        {"before": {"file": None}}, {"before": 5},
    ],
)  # fmt: skip
def test_a_step_that_no_loader_wrote_is_named(tmp_path: Path, changed: dict[str, Any]) -> None:
    log = tmp_path / "audit.jsonl"
    log.write_text(json.dumps(STEP | changed, separators=(",", ":")) + "\n")
    with pytest.raises(DataError, match=r"audit\.jsonl:1: the line of the audit log is damaged"):
        list(read_log(log))


@pytest.mark.parametrize(
    "text",
    [
        '{"step":1,"packs":' + "[" * 100_000, '{"step":1,"change":{}}', '{"step":1,"branch":0,"order":[],"sources":[]}',
        '{"step":1,"part":1,"order":{"buffer":"AAAA"},"sources":["a"],"when":""}', '{"step":1,"packs":1,"step":2}',
        '{"step":' + "9" * 5000 + ',"packs":[]}', "[]", "", '{"step":1,"packs":[],"tokens":{},"when":"' + chr(0xD800),
    ],
)  # fmt: skip
def test_a_line_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    log = tmp_path / "audit.jsonl"
    log.write_bytes(json.dumps(STEP, separators=(",", ":")).encode() + b"\n" + text.encode(errors="replace") + b"\n")
    with pytest.raises(DataError, match=r"audit\.jsonl:2: the .*line"):
        list(read_log(log))


@pytest.mark.parametrize(
    "text",
    [
        '{"step":1,"rows":[[["a",0,"s",3]]],"tokens":{"a":5},"when":"2026-01-01T00:00:00Z"}',
        '{"step":1,"branch":0,"plan":{},"sources":[],"when":"2026-01-01T00:00:00Z"}',
    ],
)
def test_a_log_of_an_earlier_version_is_refused_with_advice(tmp_path: Path, text: str) -> None:
    log = tmp_path / "audit.jsonl"
    log.write_text(text + "\n")
    with pytest.raises(DataError, match=r"audit\.jsonl:1: .* earlier mindvl-data .*version 2 or older.* that version"):
        list(read_log(log))
