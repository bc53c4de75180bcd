# SPDX-License-Identifier: Apache-2.0
"""The planted bugs of `nox -s mutants` fit the sources: each text is there once, and every area has some."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest


@pytest.fixture(scope="module")
def mutants(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", root / "tests" / "mutants" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_text_of_every_planted_bug_is_in_its_file_once(mutants: ModuleType, root: Path) -> None:
    wrong = [
        f"packages/{one.file} holds {(root / 'packages' / one.file).read_text().count(one.old)} times: {one.old}"
        for one in mutants.MUTANTS
        if (root / "packages" / one.file).read_text().count(one.old) != 1
    ]
    assert not wrong, "Adapt tests/mutants/mutants.py: " + "\n".join(wrong)


def test_every_area_has_planted_bugs_that_all_differ(mutants: ModuleType) -> None:
    assert len(mutants.MUTANTS) >= 20
    assert {one.area for one in mutants.MUTANTS} == set(get_args(mutants.Area))
    assert len({one.name for one in mutants.MUTANTS}) == len(mutants.MUTANTS)
    assert all(one.old != one.new for one in mutants.MUTANTS)


def test_the_page_names_every_planted_bug(mutants: ModuleType, root: Path) -> None:
    page = (root / "docs" / "design" / "evidence" / "mutants.md").read_text()
    assert [one.name for one in mutants.MUTANTS if f"| {one.name} |" not in page] == []
