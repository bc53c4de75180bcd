# SPDX-License-Identifier: Apache-2.0
"""Model ids are found in the cache of huggingface_hub, which the tests write, and refused with what to type."""

from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from mindvl_cli.hub import MODEL_DIRECTORY
from mindvl_cli.load import ConfigError, load_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """The cached model org/name."""
    model = tmp_path / "cache" / "models--org--name"
    directory = model / "snapshots" / COMMIT
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return directory


@pytest.mark.parametrize("text", ["org/name", "hf://org/name", "org/name@main", f"org/name@{COMMIT}"])
def test_an_id_becomes_the_directory_of_its_revision(snapshot, text):
    assert MODEL_DIRECTORY.convert(text, None, None) == snapshot


def test_a_directory_is_taken_before_an_id(snapshot, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert MODEL_DIRECTORY.convert("org/name", None, None) == Path("org/name")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("org/other@v2", "neither a directory nor a model in the cache .* hf download org/other --revision v2"),
        ("missing", "directory missing does not exist"),
        ("one/two/three", "directory one/two/three does not exist"),
    ],
)
def test_what_is_neither_is_refused(snapshot, text, message):
    with pytest.raises(click.BadParameter, match=message):
        MODEL_DIRECTORY.convert(text, None, None)


@dataclass(frozen=True, kw_only=True)
class Start:
    """A section with a path."""

    model: Path


def test_a_recipe_names_a_cached_model(snapshot, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: hf://org/name\n")
    assert load_config(recipe, Start).model == snapshot
    recipe.write_text("model: hf://org/other\n")
    with pytest.raises(ConfigError, match=r"recipe.yaml:1: model: .*hf://org/other .*hf download org/other"):
        load_config(recipe, Start)
