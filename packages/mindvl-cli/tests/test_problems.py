# SPDX-License-Identifier: Apache-2.0
"""Tests of how types and problems are put into words."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from mindvl_cli.problems import ConfigError, Problem, describe


@dataclass(frozen=True)
class Pair:
    left: int
    right: int


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "an integer"),
        (float | None, "a number or null"),
        (Literal["a", "b"], "one of 'a', 'b'"),
        (tuple[str, ...], "a list, each text"),
        (tuple[int, bool], "a list of 2: an integer, true or false"),
        (dict[str, float], "a mapping to a number"),
        (Pair, "a mapping with left, right"),
        (Path, "a path"),
    ],
)
def test_a_type_is_described_in_the_words_of_a_recipe(hint: object, words: str) -> None:
    assert describe(hint) == words


def test_a_problem_reads_where_what_and_what_to_do() -> None:
    assert str(Problem("a.yaml:3", "x.y", "7 is odd", "Use 8.")) == "a.yaml:3: x.y: 7 is odd. Use 8."
    assert str(Problem("a.yaml", "", "is empty.", "")) == "a.yaml: is empty."


def test_a_config_error_shows_every_problem() -> None:
    error = ConfigError([Problem("a", "x", "is bad", "Correct it."), Problem("b", "y", "is worse", "Drop it.")])

    assert str(error) == "a: x: is bad. Correct it.\nb: y: is worse. Drop it."
