# SPDX-License-Identifier: Apache-2.0
"""Plans are read stage by stage, with the words of the command line where they belong."""

from pathlib import Path

import pytest

from mindvl_cli.failures import CliError, one_line
from mindvl_cli.load import ConfigError
from mindvl_cli.pipeline_file import is_pipeline, load_ready, load_recipe, load_stages

RECIPE = """
phase: sft
out: elsewhere
model: {size: tiny}
init: {vision: vision encoder}
data:
  sources: [{name: pages, path: shards}]
  tokenizer: tokenizer
  packing: {seq_length: 1024}
schedule: {steps: 5, peak_lr: 1.0e-3}
global_batch_size: 1
"""
PLAN = """
out: runs
overrides: [global_batch_size=2, seed=1]
stages:
  - {name: first, recipe: recipe.yaml}
  - {name: second, recipe: recipe.yaml, start_from: first, overrides: [seed=2]}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    path = tmp_path / "pipeline.yaml"
    path.write_text(PLAN)
    return path


def test_a_recipe_is_one_stage(plan: Path) -> None:
    (stage,) = load_stages(plan.parent / "recipe.yaml", ["seed=7"])
    assert (stage.name, stage.start_from, stage.config.seed) == ("sft", None, 7)
    assert is_pipeline(plan)
    assert not is_pipeline(plan.parent / "recipe.yaml")


def test_the_command_line_speaks_after_the_stage_and_the_stage_after_the_plan(plan: Path) -> None:
    first, second = load_stages(plan)
    assert [stage.config.seed for stage in (first, second)] == [1, 2]
    assert [stage.config.global_batch_size for stage in (first, second)] == [2, 2]
    assert [stage.config.seed for stage in load_stages(plan, ["seed=9"])] == [9, 9]


def test_a_stage_stands_below_the_plan_and_starts_where_an_earlier_one_ended(plan: Path) -> None:
    first, second = load_stages(plan, ["out=/big disk"])
    assert (first.config.out, second.config.out) == (Path("/big disk/first"), Path("/big disk/second"))
    assert (first.config.init.vision, first.config.init.checkpoint) == (Path("vision_encoder"), None)
    assert (second.config.init.vision, second.config.init.checkpoint) == (None, Path("/big disk/first"))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "start_from: first",
            "start_from: third",
            "start_from='third' of stage 'second' is no earlier stage. Use one of",
        ),
        ("name: second", "name: first", "two stages are called 'first'"),
        ("name: first", "name: a/b", "name='a/b' is no name of a directory"),
        ("[seed=2]", "[sead=2]", "Did you mean 'seed'"),
        ("recipe: recipe.yaml}", "recipe: gone.yaml}", "gone.yaml: cannot be read"),
        ("overrides: [packs", "override: [packs", "override: is an unknown key"),
    ],
)
def test_a_wrong_plan_is_refused_by_name(plan: Path, before: str, after: str, said: str) -> None:
    plan.write_text(PLAN.replace(before, after))
    with pytest.raises(ConfigError) as caught:
        load_stages(plan)
    assert said in str(caught.value)


def test_where_one_run_is_wanted_a_plan_names_its_recipes(plan: Path) -> None:
    recipe = plan.parent / "recipe.yaml"
    assert load_recipe(recipe, ["seed=7"]).seed == 7
    with pytest.raises(CliError) as caught:
        load_recipe(plan)
    assert str(caught.value) == f"{plan} is a plan of several runs; name one of its recipes: {recipe}."


def test_a_recipe_for_merging_is_known_by_its_models(tmp_path: Path) -> None:
    merge = tmp_path / "merge.yaml"
    merge.write_text("models: [one, two]\nout: merged\n")
    with pytest.raises(CliError, match="Use it by: mindvl merge"):
        load_stages(merge)


def test_everything_that_is_not_there_is_named_at_once(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plan.parent)
    (plan.parent / "vision_encoder").mkdir()
    with pytest.raises(CliError) as caught:
        load_ready(plan.parent / "recipe.yaml")
    assert one_line(caught.value).splitlines() == [
        f"error: {key}: {name} does not exist. Make it, or name another place by {key}=PATH."
        for key, name in (("data.tokenizer", "tokenizer"), ("data.sources.0.path", "shards"))
    ]


def test_a_check_does_not_ask_for_a_writable_out_to_which_it_writes_nothing(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plan.parent)
    for name in ("vision_encoder", "tokenizer", "shards"):
        (plan.parent / name).mkdir()
    (plan.parent / "file").write_text("")
    assert load_ready(plan.parent / "recipe.yaml", ["out=file/below"]).out == Path("file/below")
