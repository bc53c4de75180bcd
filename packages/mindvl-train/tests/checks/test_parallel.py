# SPDX-License-Identifier: Apache-2.0
"""Layouts by name, and runs that differ are found; tests of the command start processes."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindvl_model.testing.tiny import smallest_qwen3_moe
from mindvl_train import CheckpointConfig, ModelSection, RunConfig, TrainError, run_training
from mindvl_train.checks.parallel import LayoutReport, compare_runs, in_layout, parse_layout, usual_layouts
from mindvl_train.config import ParallelConfig

Make = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("name", "sizes", "processes"),
    [
        ("one", {}, 1),
        ("dp2", {}, 2),
        ("tp2pp2", {"tp_size": 2, "pp_size": 2}, 4),
        ("pp2vpp2", {"pp_size": 2, "virtual_stages": 2}, 2),
        ("cp2dp2", {"cp_size": 2}, 4),
        ("ep2", {"ep_size": 2}, 2),
        ("tp2ep2", {"tp_size": 2, "ep_size": 2}, 2),
    ],
)
def test_a_layout_is_named_by_its_sizes(make_config: Make, name: str, sizes: dict[str, Any], processes: int) -> None:
    model = smallest_qwen3_moe(vocab_size=264, num_layers=4)
    config = make_config(model=ModelSection(vision=model.vision, language=model.language), packs_per_step=4)
    run, found = in_layout(config, name)
    assert run.parallel == ParallelConfig(**sizes)
    assert found == processes


@pytest.mark.parametrize("name", ["tp", "xp2", "tp2,pp2", "2tp", "", "oneone", "vpp2"])
def test_a_name_that_is_no_layout_is_refused(name: str) -> None:
    with pytest.raises(TrainError, match=r"is no layout|needs pp_size"):
        parse_layout(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [("ep2", "no experts to spread"), ("dp3", "packs_per_step=2"), ("tp3", "tp_size=3")],
)
def test_a_layout_the_model_does_not_allow_is_refused_with_the_reason(make_config: Make, name: str, why: str) -> None:
    with pytest.raises(TrainError, match=f"layout '{name}': .*{why}"):
        in_layout(make_config(), name)


def test_the_usual_layouts_are_those_the_model_allows(make_config: Make) -> None:
    assert usual_layouts(make_config()) == ["dp2", "tp2", "pp2", "cp2"]


def finished(config: RunConfig) -> Path:
    return run_training(config).out


def test_runs_that_differ_are_found_by_loss_norm_and_the_worst_parameter(make_config: Make) -> None:
    """Equal runs are equal to the last bit here; other weights or one gradient that is wrong are not."""
    every = {"steps": 2, "checkpoints": CheckpointConfig(every_steps=1, keep_last=2)}
    here = finished(make_config("here", **every))
    report = LayoutReport(layout="dp2", processes=2, steps=2)

    same = compare_runs(here, finished(make_config("same", **every)), report)
    assert (same.loss, same.grad_norm, same.gradient, same.holds) == (0.0, 0.0, 0.0, True)

    other = compare_runs(here, finished(make_config("other", seed=1, **every)), report)
    assert not other.holds
    assert min(other.loss, other.grad_norm, other.gradient) > 1e-3

    fewer = compare_runs(here, finished(make_config("fewer", trainable=("projector", "language"), **every)), report)
    assert not fewer.holds
    assert fewer.gradient == math.inf
    assert fewer.parameter.startswith("optimizer.state.exp_avg.vision.")


def test_an_error_that_is_silent_in_the_loss_is_found_in_the_gradients(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries' norms get twice their gradient: the loss of the first step is the same."""
    from mindvl_train import step

    every = {"steps": 1, "checkpoints": CheckpointConfig(every_steps=1, keep_last=2)}
    here = finished(make_config("here", **every))
    real = step.forward_backward

    def wrong(models, *arguments, **options):  # type: ignore[no-untyped-def]
        losses = real(models, *arguments, **options)
        for model in models:
            for name, parameter in model.named_parameters():
                if name.endswith("language.decoder.layers.1.self_attention.q_layernorm.weight"):
                    parameter.main_grad.mul_(2)
        return losses

    monkeypatch.setattr(step, "forward_backward", wrong)
    there = finished(make_config("there", **every))
    report = compare_runs(here, there, LayoutReport(layout="tp2", processes=2, steps=1))
    assert report.loss == 0
    assert report.gradient == pytest.approx(1, rel=0.2)
    assert report.parameter == "language.decoder.layers.1.self_attention.q_layernorm.weight"
    assert not report.holds
    assert not replace(report, gradient=0.0, grad_norm=0.0, problem="no process").holds
