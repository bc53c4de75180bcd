# SPDX-License-Identifier: Apache-2.0
"""Runs that end by the validation loss, are stopped or killed while they validate, or validate what they train on."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mindvl_data import SourceConfig
from mindvl_train import CheckpointConfig, MetricsConfig, RunConfig, TrainError, run_training
from mindvl_train.validation import validator
from mindvl_train.validation.config import ValidationConfig

pytestmark = pytest.mark.slow

Make = Callable[..., RunConfig]
Read = Callable[[Path], dict[str, torch.Tensor]]


def validations(config: RunConfig) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (config.out / "validation.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def progress(checkpoint: Path) -> Any:
    return json.loads((checkpoint / "manifest.json").read_text())["validation"]


def test_a_run_that_trains_on_its_validation_shards_is_refused_or_warned(
    make_config: Make, sources: tuple[SourceConfig, ...], caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(steps=1, validation=ValidationConfig(sources=sources[:1]))
    with pytest.raises(TrainError, match=r"validation.sources: 3 shards are also trained on.*allow_overlap=true"):
        run_training(config)
    run_training(replace(config, validation=replace(config.validation, allow_overlap=True)))
    assert "as validation.allow_overlap accepts" in caplog.text


def ending_early(make_config: Make, held_out: tuple[SourceConfig, ...], out: str) -> RunConfig:
    """A run that is finished after six of 20 steps: the loss can only fall by less than 100."""
    return make_config(
        out,
        steps=20,
        validation=ValidationConfig(sources=held_out, every_steps=2, patience=2, min_delta=100.0, measure="pages"),
        checkpoints=CheckpointConfig(every_steps=5, keep_last=1),
    )


def test_patience_ends_a_run_as_finished_and_a_larger_one_continues_it(
    make_config: Make, held_out: tuple[SourceConfig, ...]
) -> None:
    config = ending_early(make_config, held_out, "early")
    result = run_training(config)
    assert (result.step, result.finished, result.ended_early, result.data_used_up) == (6, True, True, False)
    found = progress(result.checkpoint)
    assert (found["step"], found["waited"]) == (6, 2)
    assert found["best_loss"] == min(line["loss_by_source"]["pages"] for line in validations(config))
    again = run_training(config)  # nothing left to do
    assert (again.step, again.finished, again.checkpoint) == (6, True, result.checkpoint)
    more = run_training(replace(config, validation=replace(config.validation, patience=3)))
    assert (more.step, more.finished, more.ended_early) == (8, True, True)


@pytest.mark.parametrize("stopped_in", [2, 6])
def test_a_stop_while_validating_saves_and_the_run_ends_as_if_it_had_never_stopped(
    make_config: Make,
    held_out: tuple[SourceConfig, ...],
    read_tensors: Read,
    monkeypatch: pytest.MonkeyPatch,
    stopped_in: int,
) -> None:
    straight = ending_early(make_config, held_out, "straight")
    expected = run_training(straight)
    config = ending_early(make_config, held_out, "stopped")
    forward, asked = validator.forward_only, []

    def stopping(*given: Any) -> None:
        forward(*given)
        if not asked and len(validations(config)) == stopped_in // 2 - 1:
            asked.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(validator, "forward_only", stopping)
    stopped = run_training(config)
    assert (stopped.step, stopped.finished) == (stopped_in, False)
    assert progress(stopped.checkpoint)["step"] == stopped_in - 2
    resumed = run_training(config)
    assert (resumed.step, resumed.finished, resumed.ended_early) == (6, True, True)
    assert progress(resumed.checkpoint) == progress(expected.checkpoint)
    assert validations(config) == validations(straight)
    one, other = read_tensors(expected.checkpoint), read_tensors(resumed.checkpoint)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    links = [os.readlink(run.out / "checkpoints" / "best") for run in (straight, config)]
    assert links[0] == links[1]


KILLED = """
import os, pickle, sys
from mindvl_train.checkpoints import best, saving
from mindvl_train.validation import validator
from mindvl_train import run_training
config, where, count = pickle.load(open(sys.argv[1], "rb"))
count = int(count)

def killed_in(module, name, before):
    action, calls = getattr(module, name), []
    def wrapped(*given, **more):
        calls.append(1)
        if before and len(calls) == count:
            os.kill(os.getpid(), 9)
        result = action(*given, **more)
        if not before and len(calls) == count:
            os.kill(os.getpid(), 9)
        return result
    setattr(module, name, wrapped)

if where == "validation":
    killed_in(validator, "forward_only", False)
elif where == "before link":
    killed_in(saving, "link_best", True)
elif where == "after link":
    killed_in(saving, "link_best", False)
elif where == "within link":
    killed_in(best.os, "replace", True)
elif where == "removal":
    killed_in(saving, "_remove", True)
run_training(config)
"""


@pytest.mark.parametrize(
    ("where", "count"),
    [("validation", 9), ("before link", 2), ("within link", 4), ("after link", 2), ("removal", 1)],
)
def test_a_kill_around_the_best_checkpoint_leaves_a_run_that_resumes_to_the_same_end(
    make_config: Make, held_out: tuple[SourceConfig, ...], read_tensors: Read, tmp_path: Path, where: str, count: int
) -> None:
    import pickle

    def config(out: str) -> RunConfig:
        return make_config(
            out,
            steps=6,
            validation=ValidationConfig(sources=held_out, every_steps=1),
            checkpoints=CheckpointConfig(every_steps=2, keep_last=1),
            metrics=MetricsConfig(every_steps=1, tensorboard=False),
        )

    straight, killed = config("straight"), config("killed")
    expected = run_training(straight)
    job = tmp_path / "job"
    job.write_bytes(pickle.dumps((killed, where, count)))
    done = subprocess.run([sys.executable, "-c", KILLED, str(job)], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    resumed = run_training(killed)
    one, other = read_tensors(expected.checkpoint), read_tensors(resumed.checkpoint)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert progress(resumed.checkpoint) == progress(expected.checkpoint)
    assert validations(killed) == validations(straight)
    for name in ("checkpoints", "."):
        left = [{path.name for path in (run.out / name).iterdir()} for run in (straight, killed)]
        assert left[0] == left[1]
    assert os.readlink(killed.out / "checkpoints" / "best") == os.readlink(straight.out / "checkpoints" / "best")
