# SPDX-License-Identifier: Apache-2.0
"""`mindvl merge` by arguments and by recipe."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from mindvl_cli.commands.convert import convert
from mindvl_cli.commands.eval import evaluate
from mindvl_cli.commands.merge import _score, merge
from mindvl_cli.commands.train import train
from mindvl_merge import MergeError
from mindvl_train import CheckpointError
from mindvl_train.checkpoints.export import export_checkpoint

ROOT = Path(__file__).resolve().parents[4]


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


def test_a_dry_run_of_a_small_merge_prints_bytes_and_seconds_in_readable_units(models, tmp_path):
    result = CliRunner().invoke(merge, [*models, "--out", str(tmp_path / "out"), "--dry-run"])
    assert re.search(r"reads [\d.]+ kB at [\d.]+ [kMG]B/s, writes [\d.]+ kB at .*: about [\d.]+ m?s\n", result.stderr)


@pytest.fixture(scope="module")
def runs(tiny_place, tmp_path_factory):
    """Two training runs of the tiny recipe of SFT, from one seed of weights, in another data order."""
    out = tmp_path_factory.mktemp("runs")
    recipe = yaml.safe_load((ROOT / "recipes" / "tiny" / "sft.yaml").read_text())
    recipe |= {"init": {}, "schedule": {"steps": 2, "peak_lr": 0.001}, "checkpoints": {"every_steps": 2}}
    recipe["data"]["tokenizer"] = str(tiny_place / "tokenizer")
    for source in recipe["data"]["sources"]:
        source["path"] = str(tiny_place / source["path"])
    for seed in (0, 1):
        recipe["out"], recipe["data"]["seed"] = str(out / f"seed-{seed}"), seed
        (out / f"{seed}.yaml").write_text(json.dumps(recipe))
        result = CliRunner().invoke(train, [str(out / f"{seed}.yaml")], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    return [out / "seed-0", out / "seed-1"]


@pytest.mark.slow
def test_training_runs_are_converted_and_merged(runs, tmp_path):
    checkpoints = [next((run / "checkpoints").glob("step-*")) for run in runs]
    out = tmp_path / "out"
    arguments = [str(runs[0]), str(checkpoints[1]), "--out", str(out), "--json"]  # a run and a checkpoint
    document = json.loads(CliRunner().invoke(merge, arguments, catch_exceptions=False).stdout)
    assert [one["path"] for one in document["models"]] == [str(runs[0]), str(checkpoints[1])]
    parents = []
    for run in runs:
        CliRunner().invoke(convert, [str(run), str(tmp_path / run.name)], catch_exceptions=False)
        parents.append(load_file(tmp_path / run.name / "model.safetensors"))
    merged = load_file(out / "model.safetensors")
    assert merged.keys() == parents[0].keys()
    assert any(not torch.equal(parents[0][name], parents[1][name]) for name in merged)
    for name, values in merged.items():
        mean = (parents[0][name].double() + parents[1][name].double()) / 2
        assert torch.equal(values, mean.to(values.dtype)), name
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "seed-0", "seed-1"]


@pytest.fixture(scope="module")
def adapter_runs(runs, tmp_path_factory):
    """A base model, and two training runs of adapters on it, of other ranks and layers and in another data order."""
    place = tmp_path_factory.mktemp("adapters")
    assert CliRunner().invoke(convert, [str(runs[0]), str(place / "base")]).exit_code == 0
    for number, adapter in enumerate(({"rank": 2, "alpha": 4}, {"rank": 3, "alpha": 3, "targets": ["q_proj"]})):
        recipe = json.loads((runs[0].parent / f"{number}.yaml").read_text())
        recipe |= {"out": str(place / f"run-{number}"), "model": {"directory": str(place / "base")}, "adapter": adapter}
        recipe["init"] = {"model": str(place / "base")}
        (place / "recipe.yaml").write_text(json.dumps(recipe))
        result = CliRunner().invoke(train, [str(place / "recipe.yaml")], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    return place


@pytest.mark.slow
def test_adapters_of_runs_and_directories_are_averaged_and_folded(adapter_runs, tmp_path):
    place, exported, averaged = adapter_runs, tmp_path / "exported", tmp_path / "averaged"
    for arguments in (
        [convert, str(place / "run-1"), str(exported)],
        [merge, str(place / "run-0"), str(exported), "--weights", "0.25,0.75", "--out", str(averaged)],
        [convert, str(place / "base"), str(tmp_path / "folded"), "--merge-adapter", str(averaged)],
        [convert, str(place / "run-0"), str(tmp_path / "first")],
    ):
        result = CliRunner().invoke(arguments[0], arguments[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert json.loads((averaged / "adapter_config.json").read_text())["r"] == 5
    base, folded = (load_file(one / "model.safetensors") for one in (place / "base", tmp_path / "folded"))
    changes = {}
    for directory, scaling in ((tmp_path / "first", 0.25 * 2), (exported, 0.75 * 1)):
        held = load_file(directory / "adapter_model.safetensors")
        for name in held:
            if name.endswith(".lora_A.weight"):
                product = held[name.replace("lora_A", "lora_B")].double() @ held[name].double()
                key = name.removeprefix("base_model.model.").replace("lora_A.", "")
                changes[key] = changes.get(key, 0) + scaling * product
    assert base.keys() == folded.keys()
    assert any(change.any() for name, change in changes.items() if "q_proj" not in name)
    for name, values in base.items():
        expected = values.double() + changes.pop(name, 0)
        torch.testing.assert_close(folded[name].double(), expected, rtol=1e-6, atol=1e-9)
    assert not changes


@pytest.mark.slow
def test_adapters_and_models_are_not_mixed(adapter_runs, tmp_path):
    sources = [str(adapter_runs / "run-0"), str(adapter_runs / "base")]
    with pytest.raises(MergeError, match=r"is an adapter, but .*base is not\. Fold each adapter"):
        CliRunner().invoke(merge, [*sources, "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_interrupted_merge_keeps_what_it_converted(runs, tmp_path, monkeypatch):
    converted = []

    def export(source, destination, **values):
        if len(converted) == stop_after:
            raise KeyboardInterrupt
        converted.append(source.name)
        export_checkpoint(source, destination, **values)

    monkeypatch.setattr("mindvl_train.checkpoints.export.export_checkpoint", export)
    arguments = [*map(str, runs), "--out", str(tmp_path / "out")]
    stop_after = 1
    CliRunner().invoke(merge, arguments)
    assert converted == ["seed-0"]
    assert not (tmp_path / "out").exists()
    stop_after = 2
    result = CliRunner().invoke(merge, [*arguments, "--only", "nothing"])  # refused after the conversion
    assert isinstance(result.exception, MergeError)
    assert "has the converted models. The same command uses them" in result.output
    stop_after = 0
    assert CliRunner().invoke(merge, arguments, catch_exceptions=False).exit_code == 0
    assert converted == ["seed-0", "seed-1"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out"]


def test_a_run_without_a_checkpoint_is_refused_by_name(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    result = CliRunner().invoke(merge, [str(tmp_path / "run"), str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, CheckpointError)
    assert str(tmp_path / "run") in str(result.exception)


def test_a_file_between_directories_is_named(models, tmp_path):
    recipe = tmp_path / "merge.yaml"
    recipe.write_text("{}")
    result = CliRunner().invoke(merge, [models[0], str(recipe), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "merge.yaml: is a file between 2 SOURCES. Give one merge recipe alone" in result.output


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
