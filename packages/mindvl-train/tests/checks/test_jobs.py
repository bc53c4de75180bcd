# SPDX-License-Identifier: Apache-2.0
"""A job runs on every rank; what a rank says when it fails is what the caller hears."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mindvl_train import RunConfig, TrainError
from mindvl_train.checks.jobs import apart, run_job
from mindvl_train.config import FaultsConfig

pytestmark = pytest.mark.slow

PROGRAM = """
import os
from mindvl_train.checks.jobs import run_rank

def work(task):
    rank = int(os.environ["RANK"])
    if task == "fail" and rank == 1:
        raise ValueError("the second one cannot")
    return task, rank, os.environ["WORLD_SIZE"]

run_rank(work)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_work.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    return "some_work"


def test_every_rank_gets_the_task_and_is_logged(program: str, tmp_path: Path) -> None:
    found = run_job(program, {"a": 1}, tmp_path / "job", processes=2, num_cores=2)
    assert found == [({"a": 1}, 0, "2"), ({"a": 1}, 1, "2")]
    with pytest.raises(TrainError, match="ValueError: the second one cannot"):
        run_job(program, "fail", tmp_path / "other", processes=2, num_cores=2)


def test_a_check_writes_no_log_where_the_recipe_does_and_skips_no_step(make_config: Callable[..., RunConfig]) -> None:
    given = make_config(faults=FaultsConfig(on_anomalous_step="skip"))
    logged = replace(given.data, audit_log=Path("audit.jsonl"), quarantine_log=Path("quarantine.jsonl"))
    assert apart(replace(given, data=logged)) == replace(given, faults=FaultsConfig())
