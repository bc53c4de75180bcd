# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation site: links between them, generated references and figures."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def generate(root: Path) -> ModuleType:
    """docs/generate/stage.py, which imports the files beside it."""
    sys.path.insert(0, str(root / "docs" / "generate"))
    try:
        return importlib.import_module("stage")
    finally:
        sys.path.pop(0)


def test_all_pages_are_collected_without_a_dead_link(generate: ModuleType, tmp_path: Path) -> None:
    assert generate.stage(tmp_path) == []
    fields = (tmp_path / "pages" / "reference" / "recipe-fields.md").read_text()
    assert "| `trainable` | list (`vision`, `projector`, `language`) or null | `null` |" in fields
    assert "## mindvl train" in (tmp_path / "pages" / "reference" / "commands.md").read_text()


def test_every_page_is_in_the_navigation(generate: ModuleType, root: Path) -> None:
    navigation = (root / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = [page for page in generate._pages().values() if page.endswith(".md")]
    assert [page for page in pages if f" {page}\n" not in navigation] == []


def test_a_dead_link_is_named(generate: ModuleType) -> None:
    problems: list[str] = []
    pages = {"SECURITY.md": "guides/security.md", "README.md": "index.md"}
    text = generate._relinked("[a](nothing.md) [b](README.md)", "SECURITY.md", pages, problems)
    assert problems == ["SECURITY.md: nothing.md leads nowhere. Correct the link."]
    assert text == "[a](nothing.md) [b](../index.md)"
