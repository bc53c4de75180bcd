# SPDX-License-Identifier: Apache-2.0
"""Pipeline files are read stage by stage, with overrides applied in order."""

from pathlib import Path

import pytest

from mindvl_cli.failures import CliError, one_line
from mindvl_cli.load import ConfigError
from mindvl_cli.pipeline_file import is_pipeline, load_ready, load_recipe, load_stages

RECIPE = """
phase: sft
out: elsewhere
model: {size: tiny}
init: {vision: vision}
data:
  sources: [{name: pages, path: shards}]
  tokenizer: tokenizer
  packing: {seq_length: 1024}
schedule: {steps: 5, peak_lr: 1.0e-3}
global_batch_size: 1
"""
PIPELINE = """
out: runs
overrides: [global_batch_size=2, seed=1]
stages:
  - {name: first, recipe: recipe.yaml}
  - {name: second, recipe: recipe.yaml, start_from: first, overrides: [seed=2]}
"""


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    path = tmp_path / "pipeline.yaml"
    path.write_text(PIPELINE)
    return path


def test_a_recipe_is_one_stage(pipeline: Path) -> None:
    (stage,) = load_stages(pipeline.parent / "recipe.yaml", ["seed=7"])
    assert (stage.name, stage.start_from, stage.config.seed) == ("sft", None, 7)
    assert is_pipeline(pipeline)
    assert not is_pipeline(pipeline.parent / "recipe.yaml")


def test_overrides_apply_in_the_order_pipeline_stage_command_line(pipeline: Path) -> None:
    first, second = load_stages(pipeline)
    assert [stage.config.seed for stage in (first, second)] == [1, 2]
    assert [stage.config.global_batch_size for stage in (first, second)] == [2, 2]
    assert [stage.config.seed for stage in load_stages(pipeline, ["seed=9"])] == [9, 9]


def test_a_stage_writes_below_the_pipeline_and_starts_from_an_earlier_one(pipeline: Path) -> None:
    first, second = load_stages(pipeline, ["out=/big disk"])
    assert (first.config.out, second.config.out) == (Path("/big disk/first"), Path("/big disk/second"))
    assert (first.config.init.vision, first.config.init.checkpoint) == (Path("vision"), None)
    assert (second.config.init.vision, second.config.init.checkpoint) == (None, Path("/big disk/first"))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            "start_from: first",
            "start_from: third",
            "start_from='third' of stage 'second' is not an earlier stage. Use one of",
        ),
        ("name: second", "name: first", "two stages have the name 'first'"),
        ("name: first", "name: a/b", "stages.0.name: must be a directory name, got 'a/b'"),
        ("[seed=2]", "[sead=2]", "Did you mean 'seed'"),
        ("recipe: recipe.yaml}", "recipe: gone.yaml}", "gone.yaml: cannot be read"),
        ("overrides: [global", "override: [global", "override: is an unknown key"),
    ],
)
def test_a_wrong_pipeline_file_is_refused(pipeline: Path, before: str, after: str, expected: str) -> None:
    pipeline.write_text(PIPELINE.replace(before, after))
    with pytest.raises(ConfigError) as caught:
        load_stages(pipeline)
    assert expected in str(caught.value)


def test_a_pipeline_file_is_refused_where_a_recipe_is_needed(pipeline: Path) -> None:
    recipe = pipeline.parent / "recipe.yaml"
    assert load_recipe(recipe, ["seed=7"]).seed == 7
    with pytest.raises(CliError) as caught:
        load_recipe(pipeline)
    assert str(caught.value) == f"{pipeline}: is a pipeline file, not a recipe. Name one of its recipes: {recipe}."


def test_a_merge_recipe_is_recognized(tmp_path: Path) -> None:
    merge = tmp_path / "merge.yaml"
    merge.write_text("models: [one, two]\nout: merged\n")
    with pytest.raises(CliError, match=r"is a merge recipe.* Run: mindvl merge"):
        load_stages(merge)


def test_all_missing_paths_are_named_at_once(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pipeline.parent)
    (pipeline.parent / "vision").mkdir()
    with pytest.raises(CliError) as caught:
        load_ready(pipeline.parent / "recipe.yaml")
    assert one_line(caught.value).splitlines() == [
        f"error: {key}: {name} does not exist. Create it, or set {key}=PATH."
        for key, name in (("data.tokenizer", "tokenizer"), ("data.sources.0.path", "shards"))
    ]


def test_a_check_does_not_need_a_writable_out(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pipeline.parent)
    for name in ("vision", "tokenizer", "shards"):
        (pipeline.parent / name).mkdir()
    (pipeline.parent / "file").write_text("")
    assert load_ready(pipeline.parent / "recipe.yaml", ["out=file/below"]).out == Path("file/below")
