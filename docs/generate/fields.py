# SPDX-License-Identifier: Apache-2.0
"""Reference tables of configuration dataclasses: every field with its type, default and description.

Comes before stage.py. A field is described by the comment on its line or by the comment lines directly above it, and a
class by its docstring, so that a page cannot say anything that the code does not.
"""

import ast
import dataclasses
import inspect
import io
import re
import textwrap
import tokenize
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", type(None): "null"}
UNIONS = (Union, types.UnionType)
PRAGMA = re.compile(r"type: ignore\[[\w-]+\](?:\s*#\s*)?")  # a note to the type checker, before a description


@dataclasses.dataclass(frozen=True)
class Section:
    """One dataclass at one key path of a recipe."""

    key: str  # dotted path; "" at the top
    config: type


def sections(config: type, key: str = "") -> Iterator[Section]:
    """The class itself and all dataclasses below it, in the order of their fields."""
    yield Section(key, config)
    hints = get_type_hints(config)
    for field in _fields(config):
        below = f"{key}.{field.name}" if key else field.name
        is_list = get_origin(hints[field.name]) is tuple
        for part in _dataclasses_in(hints[field.name]):
            yield from sections(part, f"{below}.N" if is_list else below)


def describe(section: Section, *, title: str, heading: str = "##") -> str:
    """Markdown of one section: a heading, the docstring of the class, and the table of its fields."""
    name = f"`{section.key}`" if section.key else title
    kinds = [field.default for field in _fields(section.config) if field.name == "kind"]
    hints = get_type_hints(section.config)
    if kinds and len(get_args(hints["kind"])) == 1:  # one class of a union
        name += f" with `kind: {kinds[0]}`"
    lines = [f"{heading} {name}", "", inspect.cleandoc(section.config.__doc__ or "").split("\n\n")[0], ""]
    lines += ["| field | meaning |", "|---|---|"]
    comments = _comments(section.config)
    for field in _fields(section.config):
        kind, meaning = _type(hints[field.name]), comments.get(field.name, "")
        below = _dataclasses_in(hints[field.name])
        if len(below) == 1:
            meaning = meaning or inspect.cleandoc(below[0].__doc__ or "").split("\n\n")[0].replace("\n", " ")
        field_cell = f"`{field.name}`<br>{kind}, {_default(field)}"
        cells = (field_cell, meaning.replace("None:", "`null`:"))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def undescribed(config: type) -> list[str]:
    """Names of all fields below `config` that no comment describes."""
    missing = []
    for section in sections(config):
        comments = _comments(section.config)
        names = [field.name for field in _fields(section.config) if field.name not in comments]
        missing += [f"{section.config.__name__}.{name}" for name in names if name != "kind"]
    return list(dict.fromkeys(missing))


def _fields(config: type) -> list[dataclasses.Field]:
    assert dataclasses.is_dataclass(config), config
    return [field for field in dataclasses.fields(config) if field.init]


def _dataclasses_in(hint: Any) -> list[type]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return [hint]
    return [found for part in get_args(hint) for found in _dataclasses_in(part)]


def _type(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return "section"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin is tuple:
        inner = _type(args[0])
        return "list of sections" if inner == "section" else f"list ({inner})"
    if origin in UNIONS:
        names = dict.fromkeys(_type(part) for part in args)
        if "path" in names:  # a path may be given as text everywhere
            names.pop("text", None)
        return " or ".join(names)
    if origin is not None:  # mappings
        return "mapping"
    return NAMES.get(hint, "mapping" if hint is dict else str(getattr(hint, "__name__", hint)))


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
        return "optional" if dataclasses.is_dataclass(value) else "default empty"
    if field.default is dataclasses.MISSING:
        return "required"
    value = field.default.value if isinstance(field.default, Enum) else field.default
    if isinstance(value, bool):
        return f"default `{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"default `[{', '.join(map(str, value))}]`" if value else "default empty"
    return "default `null`" if value is None else f"default `{value}`"


def _comments(config: type) -> dict[str, str]:
    """Description of each field, of the class and of those it inherits from."""
    found: dict[str, str] = {}
    for parent in reversed(config.__mro__):
        if dataclasses.is_dataclass(parent):
            found |= _own_comments(parent)
    return found


def _own_comments(config: type) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(config))
    lines = source.splitlines()
    comments = {
        token.start[0]: PRAGMA.sub("", token.string.removeprefix("#").strip())
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above = []
        line = node.lineno - 1
        while line in comments and lines[line - 1].lstrip().startswith("#"):
            above.insert(0, comments[line])
            line -= 1
        on_line = [comments[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in comments]
        if text := " ".join([*above, *on_line]):
            found[node.target.id] = text
    return found
