# SPDX-License-Identifier: Apache-2.0
"""Tests of `mindvl train`: how a recipe is refused, how a pipeline resumes; tests/demo/test_pipeline.py sees it train."""

import getpass
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from click.testing import CliRunner, Result
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mindvl_cli.commands.train import train
from mindvl_cli.failures import CliError
from mindvl_cli.load import ConfigError
from mindvl_train import RunConfig, TrainError

pytestmark = pytest.mark.slow

train_module = importlib.import_module("mindvl_cli.commands.train")
RECIPES = Path(__file__).parents[4] / "recipes"

RECIPE = """
phase: sft
out: {out}
model: {{size: tiny}}
data:
  sources: [{{name: pages, path: shards}}]
  tokenizer: tokenizer
  packing: {{seq_length: 1024}}
schedule: {{steps: 5, peak_lr: 1.0e-3}}
global_batch_size: 1
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(out=tmp_path / "run"))
    return path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.stepz=5", "steps"),
        ("schedule.steps=0", "steps: must be between 1 and"),
        ("schedule.steps=many", "schedule.steps"),
        ("model.size=huge", "huge"),
        ("data.image.patch_size=16", "patch_size"),
        ("phase=sleep", "warmup"),
    ],
)
def test_a_wrong_value_is_refused_by_name_before_anything_is_made(recipe: Path, override: str, message: str) -> None:
    result = CliRunner().invoke(train, [str(recipe), override])

    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert not (recipe.parent / "run").exists()


def test_a_run_without_its_data_says_which_directory_is_missing(recipe: Path) -> None:
    result = CliRunner().invoke(train, [str(recipe)])

    assert result.exception is not None
    assert "tokenizer" in str(result.exception)


@pytest.mark.parametrize(("words", "who"), [([], False), (["--accept-data-change"], True)])
def test_changed_data_are_accepted_by_user_and_host_only_when_asked(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], who: bool
) -> None:
    import mindvl_train

    given: dict[str, object] = {}

    def stop_here(config: object, **options: object) -> None:
        given.update(options)
        raise SystemExit(3)

    monkeypatch.setattr(mindvl_train, "run_training", stop_here)
    assert CliRunner().invoke(train, [str(recipe), *words]).exit_code == 3
    assert given["accept_data_change"] == (f"{getpass.getuser()}@{socket.gethostname()}" if who else None)


@pytest.mark.parametrize("start", [0, 40])
def test_a_resumed_run_announces_its_step_and_a_new_one_does_not(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    import mindvl_train

    def one_step(config: object, *, on_step: Any, **options: object) -> None:
        on_step(start + 1, None)
        raise SystemExit(3)

    monkeypatch.setattr(mindvl_train, "run_training", one_step)
    result = CliRunner().invoke(train, [str(recipe), "schedule.steps=50"])
    assert result.exit_code == 3
    assert ("resumed at step 40 of 50; the logs are in " in result.stderr) == bool(start)
    assert ("resumed" in result.stderr) == bool(start)


SHORT = ["schedule.steps=2", "checkpoints.every_steps=1", "metrics.tensorboard=false", "data.num_threads=0"]


def run_pipeline(place: Path, *words: str) -> Result:
    return CliRunner().invoke(train, [str(RECIPES / "tiny" / "pipeline.yaml"), *SHORT, *words])


def test_a_plan_trains_every_phase_skips_what_has_finished_and_refuses_a_changed_recipe(
    tiny_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_place)
    out = f"out={tmp_path}"
    started: list[str] = []
    real = train_module._train_here

    def watched(config: RunConfig, *arguments: Any, **options: Any) -> dict[str, Any]:
        started.append(config.out.name)
        if config.out.name == "multitask" and started.count("multitask") == 1:
            return real(config, *arguments, **options) | {"asked_to_stop": True}  # in its last step
        return real(config, *arguments, **options)

    monkeypatch.setattr(train_module, "_train_here", watched)
    stopped = run_pipeline(tmp_path, out)
    assert (stopped.exit_code, started) == (75, ["warmup", "multitask"])
    # That stage has finished all the same: only the others are left.
    result = run_pipeline(tmp_path, out, "--json")
    assert result.exit_code == 0
    assert started == ["warmup", "multitask", "sft-256", "sft-512", "sft-1024"]
    document = json.loads(result.stdout)
    assert document["finished"]
    assert [stage["step"] for stage in document["stages"]] == [2] * 5
    manifest = json.loads((tmp_path / "sft-512/checkpoints/step-00000002/manifest.json").read_text())
    assert manifest["parents"] == [str(tmp_path / "multitask")]
    again = run_pipeline(tmp_path, out)
    assert again.exit_code == 0
    assert len(started) == 5
    assert again.stdout.startswith("warmup: finished at step 2")

    changed = run_pipeline(tmp_path, out, "schedule.peak_lr=0.5")
    assert isinstance(changed.exception, TrainError)
    assert "'warmup' has finished with other settings: schedule.peak_lr was 0.001, is 0.5" in str(changed.exception)
    shutil.rmtree(tmp_path / "warmup" / "checkpoints")
    orphan = run_pipeline(tmp_path, out)
    assert isinstance(orphan.exception, TrainError)
    assert "stage 'multitask' has finished, but stage 'warmup'" in str(orphan.exception)


def test_a_dry_run_lists_what_is_missing_and_makes_nothing(recipe: Path) -> None:
    result = CliRunner().invoke(train, [str(recipe), "--dry-run"])

    assert result.exit_code == 1
    assert "problem     data.tokenizer: tokenizer does not exist." in result.stdout
    assert not (recipe.parent / "run").exists()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
@pytest.mark.parametrize("words", [["--dry-run"], []])
def test_a_variable_of_the_launcher_that_is_no_number_is_named(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: list[str]
) -> None:
    monkeypatch.setenv(name, "abc")
    result = CliRunner().invoke(train, [str(recipe), *words])
    assert isinstance(result.exception, CliError)
    assert str(result.exception).startswith(f"environment variable {name}: must be an integer, got 'abc'.")


def test_a_dry_run_of_a_plan_needs_no_stage_to_have_run(
    tiny_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_place)
    result = run_pipeline(tmp_path, f"out={tmp_path / 'run'}", "--dry-run", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["ok"]) == (0, True)
    assert [stage["start"]["from_stage"] for stage in document["stages"]] == [None, "warmup", *["multitask"] * 3]
    assert document["stages"][1]["data"]["samples_per_pack"] > 1
    assert not (tmp_path / "run").exists()
    text = run_pipeline(tmp_path, f"out={tmp_path / 'run'}", "--dry-run").stdout
    assert "weights     all parts from stage warmup" in text
    assert "problem" not in text


def test_restarts_need_a_run_that_continues_from_its_newest_checkpoint(recipe: Path) -> None:
    result = CliRunner().invoke(train, [str(recipe), "--nproc", "2", "--max-restarts", "1", "--resume", "never"])
    assert (result.exit_code, "cannot be combined with --resume never" in result.output) == (2, True)


@pytest.mark.multi
def test_torchrun_starts_a_run_again_after_a_kill_and_it_ends_like_a_quiet_one(
    recipe: Path, tiny_place: Path, tmp_path: Path
) -> None:
    text = recipe.read_text().replace("path: shards", f"path: {tiny_place / 'shards' / 'pages'}")
    recipe.write_text(text.replace("tokenizer: tokenizer", f"tokenizer: {tiny_place / 'tokenizer'}"))
    words = ["-m", "mindvl_cli.main", "train", str(recipe), "schedule.steps=12", "global_batch_size=2"]
    words += ["data.packing.seq_length=256", "checkpoints.every_steps=2", "metrics.every_steps=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    subprocess.run([sys.executable, *words, f"out={quiet}", "--nproc", "2"], env=environment, check=True)

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    agent = subprocess.Popen([*torchrun, *words, f"out={killed}"], env=environment)
    metrics, heartbeat = killed / "metrics.jsonl", killed / "heartbeat" / "rank-0001.json"
    try:
        while not metrics.is_file() or metrics.read_text().count("\n") < 3:
            assert agent.poll() is None
            time.sleep(0.01)
        os.kill(json.loads(heartbeat.read_text())["pid"], signal.SIGKILL)
        assert agent.wait(timeout=600) == 0
    finally:
        agent.terminate()
        agent.wait()
    assert "resumed at step" in (killed / "logs" / "rank-0000.log").read_text()
    weights = [_weights(out / "checkpoints" / "step-00000012") for out in (quiet, killed)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def _weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by name, read by torch alone."""
    reader = torch_checkpoint.FileSystemReader(checkpoint / "tensors")
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    torch_checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors
