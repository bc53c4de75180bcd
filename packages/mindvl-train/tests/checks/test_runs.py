# SPDX-License-Identifier: Apache-2.0
"""Two runs of the same steps: equal ones are equal, and what differs is found and named."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindvl_model.testing.tiny import smallest_qwen3_moe
from mindvl_train import CheckpointConfig, ModelSection, RunConfig, run_training
from mindvl_train.checks.bounds import BF16_MARGIN, BF16_NOISE
from mindvl_train.checks.parallel import LayoutReport
from mindvl_train.checks.runs import Difference, compare, worst

pytestmark = pytest.mark.slow

Make = Callable[..., RunConfig]


def finished(config: RunConfig) -> Path:
    return run_training(config).out


def report_of(one: Path, other: Path, *, steps: int) -> LayoutReport:
    return LayoutReport(layout="dp2", processes=2, steps=steps, differences=worst(compare(one, other, steps)))


def test_runs_that_differ_are_found_by_loss_norm_and_the_worst_parameter(make_config: Make) -> None:
    """Equal runs are equal to the last bit here; other weights or one gradient that is wrong are not."""
    every = {"steps": 2, "checkpoints": CheckpointConfig(every_steps=1, keep_last=2)}
    here = finished(make_config("here", **every))

    same = report_of(here, finished(make_config("same", **every)), steps=2)
    assert {found.value for found in same.differences.values()} == {0.0}
    assert set(same.differences) == {"loss", "grad_norm", "gradient", "figures"}  # no experts
    assert same.holds

    other = report_of(here, finished(make_config("other", seed=1, **every)), steps=2)
    assert not other.holds
    assert min(found.value for found in other.differences.values()) > 1e-3

    fewer = report_of(here, finished(make_config("fewer", trainable=("projector", "language"), **every)), steps=2)
    assert not fewer.holds
    assert fewer.differences["gradient"].value == math.inf
    assert fewer.differences["gradient"].name.startswith("optimizer.state.exp_avg.vision.")


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
    report = report_of(here, there, steps=1)
    assert report.differences["loss"].value == 0
    assert report.differences["gradient"].value == pytest.approx(1, rel=0.2)
    assert report.differences["gradient"].name == "language.decoder.layers.1.self_attention.q_layernorm.weight"
    assert report.worst == report.differences["gradient"]
    assert not report.holds


def test_what_is_silent_in_loss_and_gradients_is_found_in_routers_and_counts(make_config: Make) -> None:
    """A report whose router load is that of a part of the tokens, as without the sum over ranks; one token too many."""
    model = smallest_qwen3_moe(vocab_size=264)
    section = ModelSection(vision=model.vision, language=model.language)
    config = make_config("run", steps=1, model=section, checkpoints=CheckpointConfig(every_steps=1, keep_last=1))
    here = finished(config)
    (line,) = map(json.loads, (here / "metrics.jsonl").read_text().splitlines())
    assert {"load", "entropy"} <= line["routers"].keys()

    def changed(name: str, group: str, key: str, value: Any) -> LayoutReport:
        there = here.with_name(name)
        shutil.copytree(here, there)
        document = line | {group: line[group] | {key: value}}
        (there / "metrics.jsonl").write_text(json.dumps(document) + "\n")
        return report_of(here, there, steps=1)

    load = changed("load", "routers", "load", line["routers"]["load"] | {"1": line["routers"]["load"]["1"] * 1.01})
    entropy = changed("entropy", "routers", "entropy", {"0": line["routers"]["entropy"]["0"]})
    counted = changed("counted", "since_last", "samples", line["since_last"]["samples"] + 1)
    assert not load.holds
    assert load.worst.name == "routers/load/1"
    assert load.worst.value == pytest.approx(0.01)
    assert not entropy.holds  # a layer that tells nothing
    assert entropy.worst.name == "routers/entropy/1"
    assert not counted.holds
    assert (counted.worst.name, counted.worst.value) == ("since_last/samples", math.inf)
    assert report_of(here, here, steps=1).holds


def test_in_bf16_a_difference_is_judged_by_the_rounding_noise_of_the_same_quantity() -> None:
    empty = {"loss": {"loss": 0.0}, "grad_norm": {"grad_norm": 0.0}, "router": {}, "figures": {}}
    found = {**empty, "gradient": {"loud": 0.03, "quiet": 0.02}}
    noise = {**empty, "gradient": {"loud": 0.01, "quiet": 0.0001}}
    judged = worst(found, noise)["gradient"]  # type: ignore[arg-type]
    assert judged == Difference("quiet", 0.02, BF16_MARGIN * BF16_NOISE)
    assert not judged.holds
    assert Difference("loud", 0.03, BF16_MARGIN * 0.01).holds
    assert not Difference("lost", math.nan, 1.0).holds


def test_a_layout_that_stores_a_part_of_a_tensor_is_a_difference_and_no_traceback(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindvl_train.checks import runs

    here = finished(make_config("run", steps=1, checkpoints=CheckpointConfig(every_steps=1, keep_last=1)))
    there = here.with_name("other")
    shutil.copytree(here, there)
    read = runs._Gradients.read

    def partly(self: Any, key: str) -> Any:
        if "other" in str(self._reader._directory) and key.endswith("projector.fc1.weight"):
            raise ValueError(f"{key}: number of stored values must be 2, got 1")
        return read(self, key)

    monkeypatch.setattr(runs._Gradients, "read", partly)
    report = report_of(here, there, steps=1)
    assert report.differences["gradient"] == Difference("projector.fc1.weight", math.inf, 1e-5)
    assert not report.holds
