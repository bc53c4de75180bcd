# SPDX-License-Identifier: Apache-2.0
"""Ours and a plain loop over transformers on the same batches: their curves lie on each other, or it is noticed."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mindvl_model.testing.tiny import smallest_deepseek_v3, smallest_qwen2_5_vl, smallest_qwen3_moe
from mindvl_train import ModelSection, RunConfig, TrainError
from mindvl_train.checks.alignment import check_alignment
from mindvl_train.checks.bounds import BF16_MARGIN, BF16_NOISE

pytestmark = pytest.mark.slow


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


def test_each_quantity_beyond_its_bound_is_named(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    report = check_alignment(make_config(steps=4), tmp_path / "both")
    step = report.steps[-1]
    assert report.holds
    assert report.note == ""  # images of 56 x 84 pixels, windows of 56 x 56
    off = (*report.steps[:-1], replace(step, loss=step.loss * 1.001, grad_norm=step.grad_norm * 1.01))
    assert set(replace(report, steps=off).beyond) == {"loss", "grad_norm"}
    assert set(replace(report, parameter_difference=math.nan).beyond) == {"parameters"}
    assert not replace(report, steps=off).holds
    assert not replace(report, moved_tokens=1).holds


def test_an_optimizer_that_decays_norms_and_biases_is_caught(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindvl_train import step

    real = step.update

    def decays_all(optimizer, learning_rate, norm):  # type: ignore[no-untyped-def]
        for group in optimizer.param_groups:
            group["wd_mult"] = 1.0
        real(optimizer, learning_rate, norm)

    monkeypatch.setattr(step, "update", decays_all)
    report = check_alignment(make_config(steps=6), tmp_path / "both")
    assert "parameters" in report.beyond
    assert report.parameter_difference > 10 * report.bounds["parameters"]
    assert report.parameter.endswith(("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight", "bias"))


def test_bf16_is_judged_by_the_rounding_noise_of_the_plain_loop(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    done: list[int] = []
    report = check_alignment(make_config(steps=2, precision="bf16"), tmp_path / "both", on_step=done.append)
    assert done == list(range(1, 7))
    assert report.holds, report
    assert report.bounds["loss"] >= BF16_MARGIN * BF16_NOISE


def test_what_transformers_does_not_train_is_refused(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    refused = {"num_mtp_layers: is 1": smallest_deepseek_v3, "aux_loss_weight: is 0.001": smallest_qwen3_moe}
    for message, smallest in refused.items():
        model = smallest(vocab_size=264)
        config = make_config(model=ModelSection(vision=model.vision, language=model.language))
        with pytest.raises(TrainError, match=f"model.language.{message}"):
            check_alignment(config, tmp_path / "both")


def test_experts_train_alike(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    model = smallest_qwen3_moe(vocab_size=264, aux_loss_weight=0.0)
    config = make_config(steps=3, model=ModelSection(vision=model.vision, language=model.language))
    report = check_alignment(config, tmp_path / "both")
    assert report.holds, report
