# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation site: links between them, generated references and figures."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _imported(root: Path, name: str) -> ModuleType:
    """A file of docs/generate, which imports those beside it."""
    sys.path.insert(0, str(root / "docs" / "generate"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def generate(root: Path) -> ModuleType:
    """The file that collects the pages."""
    return _imported(root, "stage")


def test_all_pages_are_collected_without_a_dead_link(generate: ModuleType, tmp_path: Path) -> None:
    assert generate.stage(tmp_path) == []
    fields = (tmp_path / "pages" / "reference" / "recipe-fields.md").read_text()
    assert "| `trainable`<br>list (`vision`, `projector`, `language`) or null, default `null` |" in fields
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


def test_the_figures_are_what_their_script_draws(root: Path) -> None:
    for name, drawn in _imported(root, "figures").draw_all().items():
        kept = (root / "docs" / "figures" / f"{name}.svg").read_text()
        assert kept == drawn, f"docs/figures/{name}.svg is outdated: run python docs/generate/figures.py"
