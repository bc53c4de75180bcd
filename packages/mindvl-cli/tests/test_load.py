# SPDX-License-Identifier: Apache-2.0
"""Tests of strict configuration: what a recipe may hold, and how each mistake is named."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml

from mindvl_cli.load import ConfigError, load_config, load_section, parse_override, to_plain, to_yaml


@dataclass(frozen=True, kw_only=True)
class Directory:
    kind: Literal["directory"] = "directory"
    path: Path


@dataclass(frozen=True, kw_only=True)
class Shards:
    kind: Literal["shards"] = "shards"
    weight: float = 1.0
    paths: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError(f"weight={self.weight} picks nothing. Use a weight above 0.")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    peak_lr: float
    steps: int
    name: Literal["cosine", "linear"] = "cosine"
    limit: float | Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Run:
    schedule: Schedule
    sources: tuple[Directory | Shards, ...] = ()
    size: tuple[int, int] | None = None
    shares: dict[str, float] = field(default_factory=dict)
    is_fast: bool = False

    def __post_init__(self) -> None:
        if self.size and self.size[0] > self.size[1]:
            raise ValueError(f"size={list(self.size)} goes down. Put the smaller one first.")


GOOD = """\
schedule: {peak_lr: 1e-4, steps: 10}
sources:
  - kind: directory
    path: images
  - kind: shards
    weight: 2
    paths: [a, b]
size: [1, 2]
shares: {text: 0.2}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    return path


def _problems(path: Path, text: str, *overrides: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, Run, overrides)
    return [str(problem).replace(str(path), "run.yaml") for problem in caught.value.problems]


def test_a_recipe_becomes_nested_frozen_dataclasses(recipe: Path) -> None:
    run = load_config(recipe, Run)

    assert run == Run(
        schedule=Schedule(peak_lr=1e-4, steps=10),
        sources=(Directory(path=Path("images")), Shards(weight=2.0, paths=(Path("a"), Path("b")))),
        size=(1, 2),
        shares={"text": 0.2},
    )


def test_overrides_reach_into_lists_and_make_missing_mappings(recipe: Path) -> None:
    run = load_config(recipe, Run, ["sources.1.weight=3", "schedule.name=linear", "shares.image=0.8", "size=null"])

    assert run.sources[1] == Shards(weight=3.0, paths=(Path("a"), Path("b")))
    assert run.schedule.name == "linear"
    assert run.shares == {"text": 0.2, "image": 0.8}
    assert run.size is None


def test_a_later_override_wins(recipe: Path) -> None:
    assert load_config(recipe, Run, ["schedule.steps=1", "schedule.steps=2"]).schedule.steps == 2


def test_an_unknown_key_names_the_nearest_known_one(recipe: Path) -> None:
    assert _problems(recipe, "schedule: {peak_lr: 1, stesp: 2, steps: 2}") == [
        "run.yaml:1: schedule.stesp: is an unknown key. Did you mean 'steps'?"
    ]


def test_an_unknown_key_like_no_other_lists_what_is_known(recipe: Path) -> None:
    assert _problems(recipe, GOOD + "zzz: 1\n") == [
        "run.yaml:10: zzz: is an unknown key. Known keys: schedule, sources, size, shares, is_fast."
    ]


def test_a_missing_value_is_named_with_its_type(recipe: Path) -> None:
    assert _problems(recipe, "schedule:\n  peak_lr: 1") == [
        "run.yaml:1: schedule.steps: is missing. Add it: an integer."
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('steps: "10"', '"10" is text. Write an integer, without quotes.'),
        ("steps: 1.5", "1.5 is not valid. Write an integer."),
        ("steps: true", "true is not valid. Write an integer."),
        ("steps: null", "null is not valid. Write an integer."),
        ("steps: [1]", "[1] is not valid. Write an integer."),
    ],
)
def test_a_value_keeps_its_type(recipe: Path, line: str, message: str) -> None:
    assert _problems(recipe, f"schedule:\n  peak_lr: 1\n  {line}\n") == [f"run.yaml:3: schedule.steps: {message}"]


def test_a_choice_lists_what_it_can_be(recipe: Path) -> None:
    assert _problems(recipe, GOOD, "schedule.name=cosin") == [
        "command line: schedule.name: \"cosin\" is not valid. Write one of 'cosine', 'linear'."
    ]


def test_a_union_of_plain_values_is_one_problem(recipe: Path) -> None:
    assert _problems(recipe, GOOD, "schedule.limit=[1]") == [
        "command line: schedule.limit: [1] is not valid. Write a number or one of 'auto'."
    ]


def test_only_the_branch_of_the_given_kind_complains(recipe: Path) -> None:
    text = GOOD.replace("weight: 2", "weight: heavy")

    assert _problems(recipe, text) == ['run.yaml:6: sources.1.weight: "heavy" is text. Write a number, without quotes.']


def test_an_unknown_kind_lists_the_known_ones(recipe: Path) -> None:
    assert _problems(recipe, GOOD.replace("kind: shards", "kind: shard")) == [
        "run.yaml:5: sources.1.kind: 'shard' is unknown. Use one of 'directory', 'shards'."
    ]


def test_a_dataclass_that_refuses_its_values_is_named_with_its_place(recipe: Path) -> None:
    assert _problems(recipe, GOOD.replace("weight: 2", "weight: 0")) == [
        "run.yaml:5: sources.1: weight=0.0 picks nothing. Use a weight above 0."
    ]


def test_a_cross_field_error_of_the_whole_names_the_file(recipe: Path) -> None:
    assert _problems(recipe, GOOD.replace("[1, 2]", "[2, 1]")) == [
        "run.yaml: size=[2, 1] goes down. Put the smaller one first."
    ]


def test_a_dataclass_that_refuses_with_its_packages_own_error_names_the_file(recipe: Path) -> None:
    model_error = type("ModelError", (Exception,), {"__module__": "mindvl_model.errors"})

    @dataclass(frozen=True)
    class Model:
        schedule: Schedule

        def __post_init__(self) -> None:
            raise model_error("head_dim=3 is odd. Use an even size.")

    recipe.write_text("schedule: {peak_lr: 1, steps: 1}")
    with pytest.raises(ConfigError, match=r"run\.yaml: head_dim=3 is odd\. Use an even size\."):
        load_config(recipe, Model)


def test_a_packages_own_error_in_a_part_is_named_with_line_and_key_path(recipe: Path) -> None:
    model_error = type("ModelError", (Exception,), {"__module__": "mindvl_model.errors"})

    @dataclass(frozen=True)
    class VisionEncoder:
        heads: int
        kind: Literal["encoder"] = "encoder"

        def __post_init__(self) -> None:
            if self.heads % 2:
                raise model_error(f"heads={self.heads} is odd. Use an even number.")

    @dataclass(frozen=True)
    class Models:
        schedule: Schedule
        main: VisionEncoder | None = None
        choices: dict[str, tuple[Directory | VisionEncoder, ...]] = field(default_factory=dict)

    recipe.write_text(
        "schedule:\n  peak_lr: 1\n  steps: x\nmain: {heads: 3}\n"
        "choices:\n  all:\n    - kind: directory\n      path: a\n    - kind: encoder\n      heads: 5\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, Models, ["main.heads=7"])

    assert [str(problem).replace(str(recipe), "run.yaml") for problem in caught.value.problems] == [
        'run.yaml:3: schedule.steps: "x" is text. Write an integer, without quotes.',
        "run.yaml:4: main: heads=7 is odd. Use an even number.",
        "run.yaml:9: choices.all.1: heads=5 is odd. Use an even number.",
    ]


def test_all_problems_are_listed_at_once(recipe: Path) -> None:
    assert len(_problems(recipe, "schedule: {steps: x}\nsize: [1]\nsahres: {}\n")) == 4


def test_a_key_given_twice_is_refused_with_both_lines(recipe: Path) -> None:
    assert _problems(recipe, "schedule:\n  steps: 1\n  steps: 2\n") == [
        "run.yaml:3: schedule.steps: is given twice, in lines 2 and 3. Keep one of them."
    ]


def test_broken_yaml_is_named_with_its_line(recipe: Path) -> None:
    (problem,) = _problems(recipe, "schedule:\n  steps: [1\n")

    assert problem.startswith("run.yaml:3: is not valid YAML")


def test_a_file_that_is_not_there_is_our_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml", Run)


def test_a_tag_cannot_run_code(recipe: Path) -> None:
    (problem,) = _problems(recipe, "schedule: !!python/object/apply:os.getcwd []\n")

    assert "is not valid YAML" in problem


def test_an_override_below_a_plain_value_is_refused(recipe: Path) -> None:
    assert _problems(recipe, GOOD + "is_fast: true\n", "is_fast.x=1") == [
        "command line: is_fast.x: 'x' is below True, which is not a mapping. Shorten the key path."
    ]


def test_an_override_past_the_end_of_a_list_is_refused(recipe: Path) -> None:
    assert _problems(recipe, GOOD, "sources.2.weight=1") == [
        "command line: sources.2.weight: 2 is not an index of a list with 2 entries. Use 0 to 1, or override the whole list."
    ]


@pytest.mark.parametrize("text", ["steps", "=1", "a..b=1", "a=[1"])
def test_text_that_is_no_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_override(text)


def test_an_override_is_read_as_yaml() -> None:
    assert parse_override("a.b.0.c=[1, x]") == (("a", "b", 0, "c"), [1, "x"])
    assert parse_override("a=1e-3") == (("a",), 1e-3)
    assert parse_override("a=") == (("a",), None)
    assert parse_override("a=b=c") == (("a",), "b=c")


def test_a_section_is_read_without_looking_at_the_rest(recipe: Path) -> None:
    recipe.write_text(GOOD + "something_else: {a: [nothing]}\n")
    assert load_section(recipe, "schedule", Schedule, ["schedule.steps=7"]) == Schedule(peak_lr=1e-4, steps=7)
    assert load_section(recipe, "sources.0", Directory) == Directory(path=Path("images"))


def test_problems_of_a_section_carry_the_full_key_path(recipe: Path) -> None:
    recipe.write_text(GOOD.replace("steps: 10", "steps: x"))
    with pytest.raises(ConfigError, match=r"run\.yaml:1: schedule\.steps: \"x\" is text"):
        load_section(recipe, "schedule", Schedule)


def test_a_missing_section_is_named(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="model: is missing"):
        load_section(recipe, "model", Schedule)


def test_what_is_dumped_reads_back_equal(recipe: Path, tmp_path: Path) -> None:
    run = load_config(recipe, Run)
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(run))

    assert load_config(again, Run) == run
    assert json.loads(json.dumps(to_plain(run))) == yaml.safe_load(to_yaml(run))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.peak_lr=.nan", "schedule.peak_lr: nan is not a finite number. Write a finite number."),
        ("schedule.peak_lr=1e999", "schedule.peak_lr: inf is not a finite number. Write a finite number."),
        (
            f"schedule.steps=1{'0' * 30}",
            "schedule.steps: is an integer of 31 digits. Write an integer up to 9223372036854775807.",
        ),
        (
            'sources.0.path="a\\0b"',
            "sources.0.path: 'a\\x00b' contains a NUL or a lone surrogate. Remove it.",
        ),
        ("sources.0.path=''", "sources.0.path: is an empty string. Write a value, or remove the key."),
        (f"schedule.steps={'9' * 5000}", "is not valid YAML (a number of 5,000 digits"),
        (f"{'a.' * 70}b=1", "is not an override. Write KEY.PATH=VALUE."),
        (f"sources.{'9' * 5000}.path=x", "is not an override"),
        (f"sources.{'9' * 400}.path=x", "is not an index of a list with 2 entries"),
    ],
)
def test_what_no_setting_can_mean_is_one_sentence(recipe: Path, override: str, message: str) -> None:
    (problem,) = _problems(recipe, GOOD, override)
    assert message in problem
    assert problem.startswith("command line: ")
    assert len(problem) < 1000
