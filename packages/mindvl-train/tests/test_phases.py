# SPDX-License-Identifier: Apache-2.0
"""What has finished is known from checkpoints; what a finished stage may not change is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindvl_model.parallel_config import ParallelConfig
from mindvl_train import RunConfig, TrainError
from mindvl_train.checkpoints.directory import FORMAT, plain_json
from mindvl_train.checkpoints.integrity import seal
from mindvl_train.config import InitSection
from mindvl_train.phases import PipelineConfig, Stage, StageConfig, check_best, finished_stages
from mindvl_train.validation.config import ValidationConfig


def saved(config: RunConfig, step: int, **more: Any) -> None:
    """The manifest of a checkpoint, which is all that a plan looks at."""
    directory = config.out / "checkpoints" / f"step-{step:08d}"
    directory.mkdir(parents=True)
    manifest = {"format": FORMAT, "step": step, "model": {}, "run": plain_json(config), **more}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    seal(directory)


@pytest.fixture
def stages(make_config: Callable[..., RunConfig], tmp_path: Path) -> list[Stage]:
    """Two stages of four steps, the first of which has finished."""
    first = make_config("first", steps=4)
    second = make_config("second", steps=4, init=InitSection(checkpoint=tmp_path / "first"))
    saved(first, 4)
    return [Stage("first", None, first), Stage("second", "first", second)]


def test_a_stage_has_finished_when_its_last_step_is_saved(stages: list[Stage]) -> None:
    assert finished_stages(stages) == ["first"]
    saved(stages[1].config, 2)
    assert finished_stages(stages) == ["first"]
    saved(stages[1].config, 4)
    assert finished_stages(stages) == ["first", "second"]


def test_layout_and_paths_of_logs_may_change_after_a_stage_has_finished(stages: list[Stage]) -> None:
    config = stages[0].config
    data = replace(config.data, num_threads=3, audit_log=Path("elsewhere.jsonl"))
    changed = replace(config, parallel=ParallelConfig(tp_size=2), data=data)
    assert finished_stages([replace(stages[0], config=changed)]) == ["first"]


def test_a_moved_plan_still_knows_what_its_stages_started_from(stages: list[Stage], tmp_path: Path) -> None:
    saved(stages[1].config, 4)
    moved = replace(stages[1].config, init=InitSection(checkpoint=Path("/elsewhere/first")))
    assert finished_stages([stages[0], replace(stages[1], config=moved)]) == ["first", "second"]


def test_another_recipe_of_a_finished_stage_is_refused_with_what_differs(stages: list[Stage]) -> None:
    config = stages[0].config
    schedule = replace(config.schedule, peak_lr=0.5)
    with pytest.raises(
        TrainError, match=r"'first' has finished with other settings.*schedule.peak_lr was 0.003, is 0.5"
    ):
        finished_stages([replace(stages[0], config=replace(config, schedule=schedule))])
    data = replace(config.data, seed=7)
    other = [replace(stages[0], config=replace(config, data=data))]
    with pytest.raises(
        TrainError, match=r"data.seed was 0, is 7. Restore these settings. To train it again, set another `out`"
    ):
        finished_stages(other)
    assert finished_stages(other, data_may_differ=True) == ["first"]


def test_a_stage_that_finished_before_the_one_it_starts_from_is_refused(stages: list[Stage]) -> None:
    saved(stages[1].config, 4)
    (stages[0].config.out / "checkpoints" / "step-00000004").rename(stages[0].config.out / "elsewhere")
    with pytest.raises(TrainError, match="'second' has finished, but stage 'first', which it starts from, has not"):
        finished_stages(stages)


def test_a_plan_says_where_a_stage_stands_and_starts() -> None:
    first = StageConfig(name="first", recipe=Path("a.yaml"))
    second = StageConfig(name="second", recipe=Path("a.yaml"), start_from="first")
    plan = PipelineConfig(out=Path("runs"), stages=(first, second))
    assert plan.path_overrides(first) == ["out=runs/first"]
    assert plan.path_overrides(second) == ["out=runs/second", "init={checkpoint: 'runs/first'}"]
    with pytest.raises(ValueError, match="start_from='second' of stage 'second' is not an earlier stage"):
        PipelineConfig(out=Path("runs"), stages=(first, replace(second, start_from="second")))


def test_a_stage_whose_last_checkpoint_is_damaged_has_not_finished(
    stages: list[Stage], caplog: pytest.LogCaptureFixture
) -> None:
    manifest = stages[0].config.out / "checkpoints" / "step-00000004" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"phase": "sft"', '"phase": "sfu"'))
    assert finished_stages(stages) == []
    assert "manifest.json has a wrong checksum" in caplog.text


def with_validation(config: RunConfig, **settings: Any) -> RunConfig:
    return replace(config, validation=ValidationConfig(sources=config.data.sources[:1], every_steps=3, **settings))


def test_a_stage_that_was_stopped_in_its_last_validation_has_not_finished(
    make_config: Callable[..., RunConfig],
) -> None:
    config = with_validation(make_config("first", steps=4))
    saved(config, 4, validation={"step": 3})
    assert finished_stages([Stage("first", None, config)]) == []


def test_a_stage_that_its_patience_has_ended_has_finished(make_config: Callable[..., RunConfig]) -> None:
    config = with_validation(make_config("first", steps=9), patience=1)
    saved(config, 6, validation={"step": 6, "waited": 1})
    assert finished_stages([Stage("first", None, config)]) == ["first"]


def test_a_stage_starts_from_the_last_or_the_best_checkpoint(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    first = StageConfig(name="first", recipe=Path("a.yaml"))
    second = StageConfig(name="second", recipe=Path("a.yaml"), start_from="first", start_checkpoint="best")
    pipeline = PipelineConfig(out=tmp_path, stages=(first, second))
    best = tmp_path / "first" / "checkpoints" / "best"
    assert pipeline.path_overrides(second) == [f"out={tmp_path / 'second'}", f"init={{checkpoint: '{best}'}}"]
    with pytest.raises(ValueError, match="start_checkpoint: is best, but no stage is named in start_from"):
        StageConfig(name="first", recipe=Path("a.yaml"), start_checkpoint="best")
    config = make_config("first", steps=4)
    stages = [
        Stage("first", None, config),
        Stage("second", "first", replace(config, init=InitSection(checkpoint=best))),
    ]
    with pytest.raises(
        TrainError, match="'second' starts from the best checkpoint of 'first', whose recipe has no valid"
    ):
        check_best(stages)
    check_best([Stage("first", None, with_validation(config)), stages[1]])


def test_a_finished_stage_must_start_from_the_same_checkpoint(stages: list[Stage], tmp_path: Path) -> None:
    saved(stages[1].config, 4)
    best = InitSection(checkpoint=tmp_path / "first" / "checkpoints" / "best")
    with pytest.raises(TrainError, match=r"init.checkpoint was .*first, is .*best"):
        finished_stages([stages[0], replace(stages[1], config=replace(stages[1].config, init=best))])
