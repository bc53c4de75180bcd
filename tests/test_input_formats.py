# SPDX-License-Identifier: Apache-2.0
"""Every example of the page on input formats is read by the code, and gives the record and the question that the page shows."""

import importlib
import json
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mindvl_data import write_shards
from mindvl_data.formats.recognition import recognize
from mindvl_data.formats.registry import FORMATS
from mindvl_merge.evaluation.readers import load_benchmarks

GENERATE = Path(__file__).parents[1] / "docs" / "generate"


def _imported(name: str) -> ModuleType:
    sys.path.insert(0, str(GENERATE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


FORMAT_PAGE = _imported("formats")


@pytest.mark.parametrize("example", FORMAT_PAGE.DATA, ids=lambda example: str(example.title))
def test_the_record_on_the_page_is_the_one_that_is_written(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FORMAT_PAGE.materialize(example.files, tmp_path)
    monkeypatch.chdir(tmp_path)
    source, format_name, reason = recognize(example.source)
    assert (format_name, reason) == (example.format, example.reason)
    assert write_shards(source, "shards", format=format_name).samples == 1
    with tarfile.open("shards/shard-000000.tar") as archive:
        member = archive.extractfile("000000000.json")
        assert member is not None
        record = json.load(member)
    assert record.pop("source") == "shards"
    assert record == example.record


def test_every_format_has_an_example() -> None:
    assert {example.format for example in FORMAT_PAGE.DATA} == {*FORMATS}


@pytest.mark.parametrize("example", FORMAT_PAGE.BENCHMARKS, ids=lambda example: str(example.title))
def test_the_question_on_the_page_is_the_one_that_is_asked(example: Any, tmp_path: Path) -> None:
    FORMAT_PAGE.materialize(example.files, tmp_path)
    baseline = None if example.baseline is None else tmp_path / example.baseline
    (benchmark,) = load_benchmarks(tmp_path / example.source, baseline=baseline)
    (item,) = benchmark.items
    assert (item.metric, item.question, item.references) == (example.metric, example.question, example.references)
