# SPDX-License-Identifier: Apache-2.0
"""`mindvl merge` by arguments and by recipe."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from mindvl_cli.commands.eval import evaluate
from mindvl_cli.commands.merge import _score, merge
from mindvl_merge import MergeError
from mindvl_train import CheckpointError


@pytest.fixture
def models(tmp_path):
    paths = []
    for name, value in (("a", 1.0), ("b", 5.0)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((2,), value)}, tmp_path / name / "model.safetensors")
        paths.append(str(tmp_path / name))
    return paths


def _value(directory):
    return load_file(directory / "model.safetensors")["w"][0].item()


def test_models_are_averaged_and_the_manifest_printed(models, tmp_path):
    out = tmp_path / "out"
    result = CliRunner().invoke(merge, [*models, "--out", str(out), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["num_merged"] == 1
    assert _value(out) == 3.0


def test_an_old_spelling_of_a_data_type_is_refused_with_its_new_name(models, tmp_path):
    out = tmp_path / "out"
    result = CliRunner().invoke(merge, [*models, "--out", str(out), "--dtype", "bfloat16"])
    assert (result.exit_code, "'bfloat16' was renamed. Use 'bf16'." in result.output) == (2, True)
    assert CliRunner().invoke(merge, [*models, "--out", str(out), "--dtype", "bf16"]).exit_code == 0
    assert load_file(out / "model.safetensors")["w"].dtype == torch.bfloat16


def test_weights_and_force(models, tmp_path):
    out = tmp_path / "out"
    arguments = [*models, "--out", str(out), "--weights", "0.75,0.25"]
    assert CliRunner().invoke(merge, arguments, catch_exceptions=False).exit_code == 0
    assert _value(out) == 2.0
    with pytest.raises(MergeError, match="--force"):
        CliRunner().invoke(merge, arguments, catch_exceptions=False)
    assert CliRunner().invoke(merge, [*arguments, "--force"], catch_exceptions=False).exit_code == 0


def test_models_that_differ_are_refused_unless_the_key_is_named(models, tmp_path):
    for model, heads in zip(models, (4, 8), strict=True):
        (tmp_path / model / "config.json").write_text(json.dumps({"num_attention_heads": heads}))
    arguments = [*models, "--out", str(tmp_path / "out")]
    with pytest.raises(MergeError, match=r"b.config\.json: num_attention_heads is 8, but 4 in "):
        CliRunner().invoke(merge, arguments, catch_exceptions=False)
    assert not (tmp_path / "out").exists()
    allowed = [*arguments, "--allow-different", "num_attention_heads", "--json"]
    result = CliRunner().invoke(merge, allowed, catch_exceptions=False)
    assert "num_attention_heads" in json.loads(result.stdout)["warnings"][0]


def test_a_recipe_says_it_all(models, tmp_path):
    recipe = tmp_path / "merge.yaml"
    recipe.write_text(json.dumps({"models": models, "out": str(tmp_path / "out"), "weights": [1, 0]}))
    assert CliRunner().invoke(merge, [str(recipe)], catch_exceptions=False).exit_code == 0
    assert _value(tmp_path / "out") == 1.0
    assert CliRunner().invoke(merge, [str(recipe), "--weights", "1"]).exit_code == 2


@pytest.mark.parametrize("arguments", [[], ["--out", "x", "--weights", "a,b"]])
def test_wrong_usage_exits_with_two(models, arguments):
    assert CliRunner().invoke(merge, [*models, *arguments]).exit_code == 2


def test_weights_of_a_part_a_method_and_a_base(models, tmp_path):
    (tmp_path / "base").mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "base" / "model.safetensors")
    settings = ["--method", "task_arithmetic", "--base", str(tmp_path / "base"), "--scale", "0.5"]
    arguments = [*models, "--out", str(tmp_path / "out"), *settings, "--weights", "w=1,2", "--json"]
    result = CliRunner().invoke(merge, arguments, catch_exceptions=False)
    assert _value(tmp_path / "out") == 0.5 * (1 * 1 + 2 * 5)
    assert "--weights w=1.0,2.0" in json.loads(result.stdout)["command"]


def test_the_command_in_the_manifest_repeats_the_merge(models, tmp_path):
    arguments = [*models, "--out", str(tmp_path / "out"), "--weights", "0.75,0.25", "--only", "w", "--json"]
    first = json.loads(CliRunner().invoke(merge, arguments, catch_exceptions=False).stdout)
    words = shlex.split(first["command"])
    assert words[:2] == ["mindvl", "merge"]
    again = CliRunner().invoke(merge, [*words[2:], "--force", "--json"], catch_exceptions=False)
    assert json.loads(again.stdout) == first


def test_a_dry_run_measures_and_writes_nothing(models, tmp_path):
    result = CliRunner().invoke(merge, [*models, "--out", str(tmp_path / "out"), "--dry-run", "--json"])
    found = json.loads(result.stdout)
    assert (found["read_bytes"], found["written_bytes"]) == (16, 8)
    assert found["seconds"] > 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b"]


def test_training_runs_are_converted_first(tmp_path, monkeypatch):
    """The conversion itself is tested in mindvl-train; a run without a checkpoint ends with its error."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    result = CliRunner().invoke(merge, [str(tmp_path / "run"), str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, CheckpointError)
    written = []

    def export(source, destination, progress):
        destination.mkdir()
        save_file({"w": torch.full((2,), 3.0)}, destination / "model.safetensors")
        written.append(destination)

    monkeypatch.setattr("mindvl_train.checkpoints.export.export_checkpoint", export)
    arguments = [str(tmp_path / "run"), str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(merge, arguments, catch_exceptions=False)
    assert _value(tmp_path / "out") == 3.0
    assert json.loads(result.stdout)["models"][0]["path"] == str(tmp_path / "run")
    assert not written[0].exists()


def test_a_greedy_soup_is_chosen_by_the_score_of_benchmarks(models, tmp_path, monkeypatch):
    (tmp_path / "sum.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    monkeypatch.setattr("mindvl_cli.commands.merge._score", lambda directory, **_: -abs(_value(directory) - 2.0))
    arguments = [*models, "--out", str(tmp_path / "out"), "--greedy-soup", str(tmp_path / "sum.jsonl"), "--json"]
    document = json.loads(CliRunner().invoke(merge, arguments, catch_exceptions=False).stdout)
    # a alone is 1 away, b 3; their average is 1 away, as good as a
    assert [one["kept"] for one in document["soup"]] == [True, True]
    assert _value(tmp_path / "out") == 3.0


def test_the_score_of_a_directory_is_that_of_eval(model_directory, benchmark_file):
    """A tiny random model answers; the value is that of `mindvl eval`."""
    arguments = [str(model_directory), "-b", str(benchmark_file), "--json", "--trust-remote-code"]
    report = json.loads(CliRunner().invoke(evaluate, arguments, catch_exceptions=False).stdout)
    assert _score(model_directory, benchmarks=(benchmark_file,), trust_remote_code=True) == report["overall"]


def test_an_output_that_exists_is_refused_by_a_dry_run_and_before_a_conversion(models, tmp_path, monkeypatch):
    out = tmp_path / "out"
    CliRunner().invoke(merge, [*models, "--out", str(out)], catch_exceptions=False)
    result = CliRunner().invoke(merge, [*models, "--out", str(out), "--dry-run"])
    assert "the output exists" in str(result.exception)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr("mindvl_train.checkpoints.export.export_checkpoint", lambda *_, **__: pytest.fail("converted"))
    result = CliRunner().invoke(merge, [str(tmp_path / "run"), "--out", str(out)])
    assert "the output exists" in str(result.exception)


def test_what_a_killed_conversion_left_is_removed(tmp_path, monkeypatch):
    def killed(source, destination, progress):
        destination.mkdir()
        (destination / "model.safetensors").write_bytes(b"half")
        left.write_text(str(destination))

    def export(source, destination, progress):
        assert not old.exists()
        destination.mkdir()
        save_file({"w": torch.full((2,), 3.0)}, destination / "model.safetensors")

    left, export_name = tmp_path / "left", "mindvl_train.checkpoints.export.export_checkpoint"
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    arguments = [str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(export_name, killed)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # as if the process was killed
    CliRunner().invoke(merge, arguments)
    monkeypatch.undo()
    old = Path(left.read_text()) / "model.safetensors"
    assert old.exists()
    monkeypatch.setattr(export_name, export)
    assert CliRunner().invoke(merge, arguments, catch_exceptions=False).exit_code == 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["left", "out", "run"]
