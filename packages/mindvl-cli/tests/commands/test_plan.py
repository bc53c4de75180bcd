# SPDX-License-Identifier: Apache-2.0
"""`mindvl plan` through click: what it finds, what it writes, how it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mindvl_cli.commands.plan import plan
from mindvl_cli.failures import CliError
from mindvl_cli.load import load_config
from mindvl_train import RunConfig
from mindvl_train.resolved_run import resolve_run

RECIPE = Path(__file__).parents[4] / "recipes" / "mindvl-8b" / "multitask.yaml"


def _run(*words: str) -> Result:
    return CliRunner().invoke(plan, list(words), catch_exceptions=False)


def _document(*words: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_run(*words, "--json").stdout)
    return document


@pytest.mark.slow
def test_the_best_layout_comes_first_with_memory_of_every_stage_and_days() -> None:
    found = _document("mindvl-8b", "--device", "Ascend910B2", "--devices", "64", "--top", "3", "--max-pixels", "auto")
    assert [one["time"]["total"] for one in found["plans"]] == sorted(one["time"]["total"] for one in found["plans"])
    best = found["plans"][0]
    assert len(best["memory"]) == best["parallel"]["pp_size"]
    assert max(memory["total"] for memory in best["memory"]) <= found["limit"] < 64e9
    assert [one["tokens"] for one in found["days"]] == [256e9, 179e9, 12e9]
    assert found["largest_max_pixels"] > 0


@pytest.mark.slow
def test_a_recipe_is_written_with_a_layout_that_the_trainer_accepts(tmp_path: Path) -> None:
    out = tmp_path / "planned.yaml"
    result = _run(str(RECIPE), "--device", "910b2", "--devices", "128", "--global-batch-size", "512", "--out", str(out))
    assert "MFU" in result.stdout
    fitted, given = load_config(out, RunConfig), load_config(RECIPE, RunConfig)
    assert fitted.global_batch_size == 512
    assert fitted.data.sources == given.data.sources
    assert resolve_run(fitted, 128).dp_size >= 1


def test_without_a_recipe_the_sections_alone_are_written(tmp_path: Path) -> None:
    out = tmp_path / "layout.yaml"
    _run("mindvl-8b", "--device", "h100", "--devices", "8", "--top", "1", "--out", str(out))
    assert {"parallel", "recompute", "optimizer", "global_batch_size"} <= {
        line.partition(":")[0] for line in out.read_text().splitlines() if line[0] != " "
    }


@pytest.mark.slow
def test_what_does_not_fit_is_shown_and_is_an_error() -> None:
    runner = CliRunner()
    result = runner.invoke(plan, ["mindvl-671b-a37b", "--device", "910b2", "--devices", "8"])
    assert isinstance(result.exception, CliError)
    assert "needs" in result.stdout
    assert "GB of 60.2 GB" in result.stdout


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("mindvl-9b", "--device", "910b2"), "mindvl-8b"),
        (("mindvl-8b", "--device", "abacus"), "910b2"),
        (("mindvl-8b",), "--device"),
        (("mindvl-8b", "--device", "910b2", "--max-pixels", "many"), "--max-pixels"),
        (("mindvl-8b", "--measure"), "--measure"),
        (("mindvl-8b", "schedule.steps=3"), "'schedule.steps=3' overrides a recipe"),
        ((str(RECIPE.parent),), "Name one of its recipes: .*multitask.yaml, .*sft.yaml, .*warmup.yaml"),
        ((str(RECIPE.parent / "pipeline.yaml"),), "is a pipeline file"),
        (("mindvl-8b", "--device", "910b2", "--seq-length", "1001"), "Use 1000."),
        (("mindvl-8b", "--device", "910b2", "--max-pixels", "783"), "Use 784 or more."),
        ((str(RECIPE), "--device", "910b2", "--max-pixels", "784", "data.image.min_pixels=3136"), "Use 3136 or more."),
    ],
)
def test_an_unknown_value_is_refused_with_the_known_ones(words: tuple[str, ...], names: str) -> None:
    with pytest.raises(CliError, match=names):
        _run(*words)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--memory-gb", "-4"), ("--link-gb-s", "0"), ("--network-gb-s", "-1"), ("--seq-length", "10")],
)
def test_a_number_that_makes_no_sense_is_wrong_usage(option: str, value: str) -> None:
    result = _run("mindvl-8b", "--device", "910b2", option, value)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr


def test_weights_below_adapters_are_planned_in_four_bits_and_refused_on_npus() -> None:
    words = ("mindvl-8b", "--device", "rtx-4090", "--devices", "1", "--per-server", "1", "--seq-length", "8192")
    words += ("--global-batch-size", "16", "--max-pixels", "401408", "--lora-rank", "16")
    found = _document(*words, "--base-bits", "4")
    assert found["adapter"]["base_bits"] == 4
    assert found["fitting"] == 1
    assert _document(*words, "--base-bits", "16")["fitting"] == 0
    with pytest.raises(CliError, match="--base-bits: there are no adapters"):
        _run("mindvl-8b", "--device", "h100", "--base-bits", "4")
    with pytest.raises(CliError, match="no kernels for NPUs"):
        _run("mindvl-8b", "--device", "910b2", "--lora-rank", "16", "--base-bits", "4")


def test_a_value_of_the_recipe_can_be_overridden() -> None:
    found = _document(str(RECIPE), "global_batch_size=96", "--device", "910b2", "--devices", "32", "--top", "1")
    assert found["global_batch_size"] == 96
