# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation site: links between them, generated references and figures."""

import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from mindvl_merge import MergeConfig
from mindvl_train import RunConfig

FILES = (".py", ".yaml", ".md", ".json", ".jsonl", ".safetensors")
NOT_FIELDS = ("model.N", "model.visual", "model.language_model")  # prefixes of tensor names


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
    assert "type: ignore" not in fields
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


def test_every_recipe_field_is_described(root: Path) -> None:
    fields = _imported(root, "fields")
    missing = [*fields.undescribed(RunConfig), *fields.undescribed(MergeConfig)]
    assert [name for name in missing if not name.startswith("RunConfig.")] == [], (
        "add a comment to each of these fields"
    )


def test_the_figures_are_what_their_script_draws(root: Path) -> None:
    for name, drawn in _imported(root, "figures").draw_all().items():
        kept = (root / "docs" / "figures" / f"{name}.svg").read_text()
        assert kept == drawn, f"docs/figures/{name}.svg is outdated: run python docs/generate/figures.py"


FIELD = re.compile(
    r"(?<![\w/.-])((?:data|model|init|schedule|optimizer|checkpoints|metrics|parallel|recompute|faults|ops)(?:\.[\w*]+)+)"
)


def _keys(document: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of all keys, an entry of a list as N."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield f"{path}.{key}".strip(".")
            if key != "options" and key != "overrides":  # mappings with keys of their own
                yield from _keys(value, f"{path}.{key}".strip("."))
    for value in document if isinstance(document, list) else ():
        yield from _keys(value, f"{path}.N")


def _named_fields(text: str, tops: set[str]) -> Iterator[str]:
    """Fields of recipes in inline code and in blocks of YAML."""
    for block in re.findall(r"^```yaml\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        document = yaml.safe_load(block)
        if isinstance(document, dict) and document.keys() <= tops:
            yield from _keys(document)
    for code in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)):
        yield from (re.sub(r"\.(\d+|\*)(?=\.|$)", ".N", name) for name in FIELD.findall(code))


def test_every_recipe_field_named_in_a_document_exists(root: Path, workspace_files: list[Path]) -> None:
    known = {
        f"{section.key}.{field.name}".strip(".")
        for section in _imported(root, "fields").sections(RunConfig)
        for field in dataclasses.fields(section.config)
    }
    tops = {name for name in known if "." not in name}
    documents = [path for path in workspace_files if path.suffix == ".md" and path.name != "CHANGELOG.md"]
    assert [
        f"{path}: {name}"
        for path in documents
        for name in _named_fields((root / path).read_text(encoding="utf-8"), tops)
        if name not in known and not name.endswith(FILES) and not name.startswith(NOT_FIELDS)
    ] == []
