# SPDX-License-Identifier: Apache-2.0
"""Tests of mindvl_data.curation.checks."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from mindvl_data.curation import extras
from mindvl_data.curation.checks import check_disk, check_libraries, check_steps, finished_run
from mindvl_data.curation.config import CurationConfig, InputConfig, InputFormat, StepConfig
from mindvl_data.curation.engine.parts import InputFiles
from mindvl_data.errors import DataError

sys.path.insert(0, str(Path(__file__).parent / "steps"))
steps: Any = importlib.import_module("curation_test_steps")
UNIQUE = StepConfig(step="test_unique", parameters=steps.Nothing())
LENGTH = StepConfig(step="test_length", parameters=steps.Length())


def config(*chosen: StepConfig, format: InputFormat = "jsonl") -> CurationConfig:
    return CurationConfig(name="x", inputs=(InputConfig(path="x", format=format),), steps=chosen, out=Path("x"))


def test_a_step_needs_the_facts_that_earlier_steps_give() -> None:
    check_steps(config(LENGTH, UNIQUE))
    with pytest.raises(
        DataError, match=r"^steps\.0: test_unique: needs 'length', which no earlier step gives\. Add one of"
    ):
        check_steps(config(UNIQUE, LENGTH))


def test_a_missing_library_is_reported_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.EXTRA_MODULES, "curation", ("no_such_module",))
    with pytest.raises(DataError, match=r"^steps\.0: test_length: needs no_such_module, which is not installed"):
        check_libraries(config(LENGTH))


def test_a_directory_with_another_result_is_refused(tmp_path: Path) -> None:
    assert not finished_run(tmp_path, "a")
    (tmp_path / "curation.json").write_text('{"digest": "a"}')
    assert finished_run(tmp_path, "a")
    with pytest.raises(DataError, match="another configuration"):
        finished_run(tmp_path, "b")


def test_little_space_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_disk(tmp_path, [InputFiles(files=1, num_bytes=1 << 60, digest="")], 1.0)
    assert "records between steps and shards need up to" in caplog.text
