# SPDX-License-Identifier: Apache-2.0
"""Ours and a plain loop over transformers on the same batches: their curves lie on each other, or it is noticed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mindvl_model.testing.tiny import smallest_deepseek_v3, smallest_qwen2_5_vl
from mindvl_train import ModelSection, RunConfig, TrainError
from mindvl_train.checks.alignment import check_alignment


@pytest.fixture(scope="module")
def qwen2_5_vl() -> ModelSection:
    model = smallest_qwen2_5_vl(vocab_size=264)
    return ModelSection(vision=model.vision, language=model.language)


def test_ours_and_transformers_train_alike(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    done: list[int] = []
    report = check_alignment(make_config(steps=6), tmp_path / "both", on_step=done.append)
    assert done == list(range(1, 13))
    assert [step.step for step in report.steps] == list(range(1, 7))
    assert report.steps[-1].plain_loss < report.steps[0].plain_loss  # something was learned
    assert report.holds
    assert max(step.difference for step in report.steps) < 1e-5
    for step in report.steps:
        assert step.grad_norm == pytest.approx(step.plain_grad_norm, rel=1e-4)


def test_published_qwen2_5_vl_in_its_warm_up_trains_alike(
    make_config: Callable[..., RunConfig], qwen2_5_vl: ModelSection, tmp_path: Path
) -> None:
    config = make_config(steps=3, model=qwen2_5_vl, phase="warmup")  # the projector alone, positions on three axes
    report = check_alignment(config, tmp_path / "both")
    assert max(step.difference for step in report.steps) < 1e-5
    assert report.steps[0].grad_norm == pytest.approx(report.steps[0].plain_grad_norm, rel=1e-4)


def test_curves_that_part_are_noticed(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = make_config(steps=4)
    report = check_alignment(config, tmp_path / "both")
    step = report.steps[-1]
    worse = replace(report, steps=(*report.steps[:-1], replace(step, loss=step.loss * 1.02)))
    assert report.holds
    assert not worse.holds


def test_what_transformers_does_not_train_is_refused(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    model = smallest_deepseek_v3(vocab_size=264)
    config = make_config(model=ModelSection(vision=model.vision, language=model.language))
    with pytest.raises(TrainError, match="num_mtp_layers=1: transformers does not train this"):
        check_alignment(config, tmp_path / "both")
