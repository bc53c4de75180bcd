# SPDX-License-Identifier: Apache-2.0
"""Sections that make no sense are refused with the name of the field."""

from pathlib import Path
from typing import Any

import pytest

from mindvl_data import SourceConfig
from mindvl_train.validation.config import GenerationConfig, ValidationConfig

PAGES = SourceConfig(name="pages", path="held-out/pages")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"sources": ()}, "sources: the list is empty"),
        ({"sources": (PAGES, PAGES)}, r"sources: the names \['pages'\] are used twice"),
        ({"sources": (SourceConfig(name="pages", path="x", max_epochs=2),)}, "max_epochs=2"),
        ({"measure": "photos"}, "measure: 'photos' is not a validation source. Use one of pages"),
        ({"every_steps": 0}, "every_steps: must be between 1"),
        ({"patience": 0}, "patience: must be between 1"),
        ({"max_packs": 0}, "max_packs: must be between 1"),
        ({"min_delta": -0.1}, "min_delta: must be a finite number >= 0, got -0.1"),
        ({"min_delta": float("nan")}, "min_delta: must be a finite number"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ValidationConfig(**({"sources": (PAGES,)} | settings))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "neither is set"),
        ({"first_samples": -1}, "first_samples: must be between 0"),
        ({"prompts": Path("p.jsonl"), "max_new_tokens": 0}, "max_new_tokens: must be between 1"),
    ],
)
def test_generations_that_make_no_sense_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        GenerationConfig(**settings)
