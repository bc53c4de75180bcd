# SPDX-License-Identifier: Apache-2.0
"""Tests of the whole study at the smallest size, with two seeds, stopped and resumed."""

from dataclasses import replace
from pathlib import Path

import pytest

from mindvl_cli.demo.pipeline import DemoRun
from mindvl_cli.demo.settings import STUDY
from mindvl_cli.demo.stages import StageBook
from mindvl_cli.demo.study import IMAGE_TASKS, TEST_TASKS, SeedScores, run_study

pytestmark = pytest.mark.slow

SMALLEST = replace(
    STUDY,
    vision=replace(STUDY.vision, hidden_size=48, num_layers=1, num_heads=3, full_attention_layers=(0,)),
    language=replace(STUDY.language, num_layers=1),
    sources={name: replace(source, num_samples=120) for name, source in STUDY.sources.items()},
    vision_backbone=replace(STUDY.vision_backbone, num_images=40, steps=2, batch_size=16),
    language_backbone=replace(STUDY.language_backbone, steps=2),
    warmup=replace(STUDY.warmup, steps=2),
    multitask=replace(STUDY.multitask, steps=2, num_processes=1),
    sft=tuple(replace(phase, steps=2, num_processes=1) for phase in STUDY.sft[:2]),
    tokenizer_samples=500,
    grid_min=(4,),
    grid_max=(12, 24),
    validation_items=2,
    test_items=2,
)


def _study(out: Path) -> tuple[SeedScores, ...]:
    return run_study(DemoRun(out=out, settings=SMALLEST, seed=5, book=StageBook(out, "test")), seeds=(1, 2))


def test_a_study_that_was_cut_off_continues_with_every_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("mindvl_cli.demo.study.merge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            _study(tmp_path)
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "stages").iterdir()}

    seeds = _study(tmp_path)

    assert "seed-1-sft-512.json" in finished
    for name, modified in finished.items():
        assert (tmp_path / "stages" / name).stat().st_mtime_ns == modified  # kept, not run again
    assert [one.seed for one in seeds] == [1, 2]
    for one in seeds:
        assert [parent.model for parent in one.parents] == ["sft-256", "sft-512"]
        assert len(one.merged.cells) == 2
        assert set(one.merged.test) == set(TEST_TASKS)
        assert set(one.merged.cells[0].by_task) == set(IMAGE_TASKS)
    recipes = [(tmp_path / "recipes" / f"seed-{seed}-sft-256.yaml").read_text() for seed in (1, 2)]
    assert recipes[0] != recipes[1]
