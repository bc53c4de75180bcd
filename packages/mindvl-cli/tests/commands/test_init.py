# SPDX-License-Identifier: Apache-2.0
"""`mindvl init` through click: what it writes, that the recipe is trained, how it refuses."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mindvl_cli.commands.init import init
from mindvl_cli.commands.train import train
from mindvl_cli.load import load_config
from mindvl_train import RunConfig


def _run(*words: str | Path) -> Result:
    return CliRunner().invoke(init, [str(word) for word in words])


@pytest.fixture
def model(model_directory: Path, tmp_path: Path) -> Path:
    """The shared tiny model with the time scale of published directories, the only one that is supported."""
    directory = shutil.copytree(model_directory, tmp_path / "qwen")
    config = json.loads((directory / "config.json").read_text())
    config["vision_config"]["tokens_per_second"] = 2
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def pages(tiny_place: Path, tmp_path: Path) -> Path:
    """A copy of the raw records of 24 images."""
    shutil.copytree(tiny_place / "pages-raw", tmp_path / "raw")
    return tmp_path / "raw" / "rows.json"


@pytest.mark.slow
def test_the_recipe_of_raw_data_passes_the_dry_run_and_trains(
    pages: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = _run(pages, "--model", model, "--shards", "shards/pages", "--out", "first.yaml")
    assert made.exit_code == 0, made.exception
    assert "format llava: the first record has `conversations`" in made.stderr
    dry = CliRunner().invoke(train, ["first.yaml", "--dry-run"])
    assert dry.exit_code == 0, (dry.exception, dry.stdout)
    words = ["first.yaml", "schedule.steps=2", "metrics.tensorboard=false", "data.num_threads=0", "--json"]
    trained = CliRunner().invoke(train, words)
    assert trained.exit_code == 0, trained.exception
    assert (tmp_path / "runs" / "pages-sft" / "checkpoints" / "step-00000002").is_dir()


def test_the_recipe_of_shards_names_the_limits_of_the_model_and_the_measured_numbers(
    tiny_place: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "recipe.yaml"
    made = _run(tiny_place / "shards" / "pages", "--model", model, "--out", out)
    assert made.exit_code == 0, made.exception
    recipe, text = load_config(out, RunConfig), out.read_text()
    assert recipe.data.packing.seq_length == 512  # max_position_embeddings of the model
    assert (recipe.data.image.min_pixels, recipe.data.image.max_pixels) == (4 * 784, 16 * 784)
    assert (recipe.init.model, recipe.model.directory, recipe.data.tokenizer) == (model,) * 3
    assert recipe.precision == "fp32"
    assert "# 99.9 % of 24 samples have at most " in text
    assert "# The limits of the model's preprocessor. 24 images were measured: median " in text
    assert all(len(line) <= 120 for line in text.splitlines() if line.lstrip().startswith("#"))


def test_shards_without_an_index_are_indexed(tiny_place: Path, model: Path, tmp_path: Path) -> None:
    shards = tmp_path / "pages"
    shards.mkdir()
    for shard in (tiny_place / "shards" / "pages").glob("*.tar"):
        shutil.copy(shard, shards)
    made = _run(shards, "--model", model, "--out", tmp_path / "recipe.yaml")
    assert made.exit_code == 0, made.exception
    assert "24 samples indexed" in made.stderr


def test_raw_data_without_a_directory_for_shards_are_refused(pages: Path, model: Path, tmp_path: Path) -> None:
    made = _run(pages, "--model", model, "--out", tmp_path / "recipe.yaml")
    assert "--shards: is required" in str(made.exception)
    assert "format llava" in str(made.exception)


def test_an_existing_recipe_is_kept(tiny_place: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "recipe.yaml"
    out.write_text("mine")
    made = _run(tiny_place / "shards" / "pages", "--model", model, "--out", out)
    assert f"--out: {out} exists" in str(made.exception)
    assert out.read_text() == "mine"


def test_a_model_of_another_family_is_refused_before_data_are_written(pages: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llava"}))
    made = _run(pages, "--model", model, "--shards", tmp_path / "shards", "--out", tmp_path / "recipe.yaml")
    assert "model_type='llava' is not supported" in str(made.exception)
    assert not (tmp_path / "shards").exists()


def test_a_model_without_a_tokenizer_is_refused(pages: Path, model: Path, tmp_path: Path) -> None:
    for path in model.glob("*token*"):
        path.unlink()
    made = _run(pages, "--model", model, "--shards", tmp_path / "shards", "--out", tmp_path / "recipe.yaml")
    assert f"--model: {model} has no tokenizer.json" in str(made.exception)


def test_data_without_samples_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[]")
    made = _run(tmp_path / "rows.json", "--model", model, "--out", tmp_path / "recipe.yaml")
    assert "rows.json" in str(made.exception)
    assert not (tmp_path / "recipe.yaml").exists()
