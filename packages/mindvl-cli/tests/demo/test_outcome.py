# SPDX-License-Identifier: Apache-2.0
"""Tests of how records become results; the whole of it is in test_pipeline.py."""

from pathlib import Path

from mindvl_cli.demo.outcome import TASK_TITLES, stage_words
from mindvl_cli.demo.pipeline import DemoRun, models
from mindvl_cli.demo.settings import FULL
from mindvl_cli.demo.stages import StageBook
from mindvl_cli.demo.tasks import BENCHMARK_TASKS


def test_every_task_of_the_table_has_a_title() -> None:
    assert set(TASK_TITLES) == set(BENCHMARK_TASKS)


def test_a_stage_says_what_it_does_in_its_own_numbers(tmp_path: Path) -> None:
    work = DemoRun(out=tmp_path, settings=FULL, seed=0, book=StageBook(tmp_path, "a"))

    for phase, name in zip(FULL.sft, models(FULL), strict=False):
        title, does = stage_words(name, work)
        assert str(phase.seq_length) in title
        assert f"images up to {phase.max_pixels} visual tokens" in does
