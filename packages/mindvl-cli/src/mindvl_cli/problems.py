# SPDX-License-Identifier: Apache-2.0
"""Explain validation errors in terms of the recipe: key path, value, and what to write instead.

Comes after pydantic has refused a document in load.py. Translates the locations of pydantic, which tries every member
of a union and reports an error for each.
"""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

KeyPath = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem, as `WHERE: KEY.PATH: WHAT. WHAT TO DO.`"""

    where: str  # file and line, or "command line"
    key_path: str  # dotted, empty for the whole document
    what: str
    to_do: str

    def __str__(self) -> str:
        key = f"{self.key_path}: " if self.key_path else ""
        what = self.what.rstrip(". ")
        return f"{self.where}: {key}{what}. {self.to_do}".rstrip()


class ConfigError(Exception):
    """A recipe or an override is not valid; lists every problem found, one line each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


def explain(error: ValidationError, cls: type, document: Any) -> Iterator[tuple[KeyPath, str, str]]:
    """Turn pydantic's errors into (key path, what, what to do), each key path once.

    Args:
        cls: The class the document was read as.
        document: The plain document, whose `kind` selects the member of a union.
    """
    merged: dict[KeyPath, tuple[str, str]] = {}
    for detail in error.errors(include_url=False):
        place = _locate(detail["loc"], cls, document)
        if place is None:
            continue
        if place.unknown_kind:
            merged[(*place.key_path, "kind")] = place.unknown_kind
        elif place.key_path not in merged:
            field_path, problem = _field_path(_explain_one(detail["type"], detail, place), place)
            merged[(*place.key_path, *field_path)] = problem
    for key_path, (what, to_do) in merged.items():
        yield key_path, what, to_do


def parts(hint: Any, document: Any) -> Iterator[tuple[KeyPath, type, Any]]:
    """The nearest dataclasses below the top of the document: (key path, class, part of the document)."""
    hint = next(iter(_dataclass_members(hint)), hint)
    entries = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in entries:
        below = _hint_below(hint, key)
        members = _dataclass_members(below)
        cls = _selected(members, value) if len(members) > 1 else next(iter(members), None)
        if cls is not None and isinstance(value, dict):
            yield (key,), cls, value
        elif not members and isinstance(value, dict | list):
            yield from (((key, *rest), cls, part) for rest, cls, part in parts(below, value))


@dataclasses.dataclass(frozen=True)
class _Place:
    key_path: KeyPath
    hint: Any  # expected type at the key path
    parent: Any  # dataclass that holds the last key
    unknown_kind: tuple[str, str] | None = None


def _locate(loc: Sequence[str | int], cls: type, document: Any) -> _Place | None:
    """Follow the location of an error through types and document; None for a union member that `kind` does not select."""
    hint: Any = cls
    parent: Any = None
    key_path: KeyPath = ()
    for step in loc:
        members = _dataclass_members(hint)
        if len(members) > 1:  # pydantic inserts the name of the union member
            selected = _selected(members, document)
            if selected is None:
                return _Place(key_path, hint, parent, unknown_kind=_unknown_kind(members, document))
            if selected.__name__ != step:
                return None
            hint = selected
            continue
        if _is_union(hint) and len(_members(hint)) > 1 and not _has(document, step):
            break  # the name of a plain member such as "float": the message lists them all
        parent = members[0] if members else hint
        hint = _hint_below(parent, step)
        document = document[step] if _has(document, step) else None
        key_path = (*key_path, step)
    return _Place(key_path, hint, parent)


def _field_path(problem: tuple[str, str], place: _Place) -> tuple[KeyPath, tuple[str, str]]:
    """Split a message "FIELD.PATH: text" of a dataclass into the path below that dataclass and the text."""
    name, colon, text = problem[0].partition(": ")
    cls = next(iter(_dataclass_members(place.hint)), None)
    if not colon or cls is None or name.split(".")[0] not in {field.name for field in dataclasses.fields(cls)}:
        return (), problem
    return tuple(name.split(".")), (text, problem[1])


def _explain_one(kind: str, detail: Any, place: _Place) -> tuple[str, str]:
    if kind == "missing":
        return "is missing", f"Add it: {describe(place.hint)}."
    if kind == "unexpected_keyword_argument":
        return _unknown_key(str(place.key_path[-1]), place.parent)
    if kind == "value_error":
        return str(detail["ctx"]["error"]), ""
    value = detail["input"]
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        return f"{shown} is text", f"Write {describe(place.hint)}, without quotes."
    return f"{shown} is not valid", f"Write {describe(place.hint)}."


def _unknown_key(name: str, parent: Any) -> tuple[str, str]:
    known = [field.name for field in dataclasses.fields(parent) if field.init]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return "is an unknown key", f"Did you mean {near[0]!r}?"
    return "is an unknown key", f"Known keys: {', '.join(known)}."


def _unknown_kind(members: list[type], document: Any) -> tuple[str, str]:
    kinds = ", ".join(repr(value) for member in members for value in _kinds(member))
    if not isinstance(document, dict):
        return f"{json.dumps(document, default=str)[:60]} is not a mapping", f"Write a mapping with kind: {kinds}."
    if "kind" not in document:
        return "is missing", f"Add one of {kinds}."
    return f"{document['kind']!r} is unknown", f"Use one of {kinds}."


def describe(hint: Any) -> str:
    """A type in words: "an integer", "one of 'a', 'b'", "a list, each text"."""
    plain = {int: "an integer", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}
    if hint in plain:
        return plain[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return describe(args[0])
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(value) for value in args)
    if _is_union(hint):
        return " or ".join(describe(member) for member in args)
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"a list of {len(args)}: " + ", ".join(describe(entry) for entry in args)
    if origin in (tuple, list) or (origin is not None and hasattr(origin, "__getitem__") and len(args) == 1):
        return f"a list, each {describe(args[0])}"
    if origin is not None and len(args) == 2:
        return f"a mapping to {describe(args[1])}"
    if dataclasses.is_dataclass(hint):
        return "a mapping with " + ", ".join(field.name for field in dataclasses.fields(hint) if field.init)
    return "a path" if getattr(hint, "__name__", "") == "Path" else str(getattr(hint, "__name__", hint))


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _members(hint: Any) -> list[Any]:
    if typing.get_origin(hint) is typing.Annotated:
        return _members(typing.get_args(hint)[0])
    return [member for member in typing.get_args(hint) if member is not types.NoneType] if _is_union(hint) else [hint]


def _dataclass_members(hint: Any) -> list[type]:
    return [member for member in _members(hint) if dataclasses.is_dataclass(member) and isinstance(member, type)]


def _kinds(member: type) -> tuple[Any, ...]:
    return typing.get_args(typing.get_type_hints(member).get("kind"))


def _selected(members: list[type], document: Any) -> type | None:
    kind = document.get("kind") if isinstance(document, dict) else None
    return next((member for member in members if kind in _kinds(member)), None)


def _has(document: Any, step: str | int) -> bool:
    if isinstance(document, dict):
        return step in document
    return isinstance(document, list) and isinstance(step, int) and step < len(document)


def _hint_below(parent: Any, step: str | int) -> Any:
    parent = _members(parent)[0]
    if dataclasses.is_dataclass(parent) and isinstance(parent, type):
        return typing.get_type_hints(parent).get(str(step), Any)
    args = typing.get_args(parent)
    if isinstance(step, int) and args and args[-1] is not Ellipsis and len(args) > 1:
        return args[step] if step < len(args) else Any
    if len(args) == 2 and args[-1] is not Ellipsis:
        return args[1]
    return args[0] if args else Any
