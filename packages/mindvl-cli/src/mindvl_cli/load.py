# SPDX-License-Identifier: Apache-2.0
"""Read a recipe: YAML and KEY=VALUE overrides become one frozen dataclass, or a list of problems.

Comes before every package: packages receive dataclasses and never read YAML. Precedence: field default < file <
override. Values keep their type (no "3" for 3); only an int may be given for a float, and text for a path. A relative
path in a recipe is relative to the working directory, like one on the command line.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from mindvl_cli.failures import is_ours
from mindvl_cli.hub import HUB_PREFIX, cached_model, download_command
from mindvl_cli.problems import ConfigError, Problem, explain, parts
from mindvl_cli.renamed import KEYS
from mindvl_cli.yaml_text import DuplicateKeyError, parse_document, parse_scalar

__all__ = ["ConfigError", "load_config", "load_section", "parse_override", "to_plain", "to_yaml", "top_keys"]

T = TypeVar("T")
KeyPath = tuple[str | int, ...]
_MAX_INTEGER = 2**63 - 1  # the largest of numpy, torch and JSON readers of other languages
_MAX_KEYS = 64  # levels of a key path


def load_config(path: Path, cls: type[T], overrides: Sequence[str] = ()) -> T:
    """Read the whole file as one `cls`.

    Args:
        path: YAML file.
        cls: A dataclass; it may have nested dataclasses, tuples, Literal, Path, and unions selected by `kind`.
        overrides: `a.b.0.c=VALUE` each, applied to the file in this order; VALUE is read as YAML.

    Raises:
        ConfigError: Names every problem found, each with file, key path, value and what to do.
    """
    return _load(path, (), cls, overrides)


def load_section(path: Path, section: str, cls: type[T], overrides: Sequence[str] = ()) -> T:
    """Read one section of the file, such as "data" of a training recipe, without validating the rest of it.

    Args:
        section: Key path, such as "data" or "data.sources.0".
        overrides: As in `load_config`, from the top of the file; those of other sections are parsed only.
    """
    return _load(path, _key_path(section), cls, overrides)


def top_keys(path: Path) -> list[str]:
    """The top-level keys of a file, which identify its kind before it is read as a class."""
    document, _ = _read(path)
    return [str(key) for key in document] if isinstance(document, dict) else []


def parse_override(text: str) -> tuple[KeyPath, Any]:
    """Split `a.b.0.c=VALUE` into its key path and its value, read as YAML: `phase=sft` or `data.weights=[1, 2]`."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")) or key.count(".") >= _MAX_KEYS or len(key) > 500:
        raise ConfigError([Problem("command line", "", f"{text[:200]!r} is not an override", "Write KEY.PATH=VALUE.")])
    try:
        return _key_path(key), parse_scalar(value)
    except (yaml.YAMLError, DuplicateKeyError) as error:
        shown = value if len(value) <= 60 else value[:57] + "..."
        what = f"{shown!r} is not valid YAML ({' '.join(str(error).split())})"
        raise ConfigError([Problem("command line", key, what, "Quote the value, or set it in the recipe.")]) from error


def to_plain(config: Any) -> Any:
    """The config as dicts, lists and scalars that YAML and JSON can hold, and that `load_config` reads back."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: to_plain(getattr(config, field.name)) for field in dataclasses.fields(config) if field.init}
    if isinstance(config, Mapping):
        return {str(key): to_plain(value) for key, value in config.items()}
    if isinstance(config, Sequence) and not isinstance(config, str | bytes):
        return [to_plain(value) for value in config]
    if isinstance(config, Enum):
        return config.value
    return str(config) if isinstance(config, Path) else config


def to_yaml(config: Any) -> str:
    """The config as the text of a recipe, in field order."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True, width=120)


def _load(path: Path, section: KeyPath, cls: type[T], overrides: Sequence[str]) -> T:
    document, lines = _read(path)
    overridden = set()
    for text in overrides:
        key_path, value = parse_override(text)
        document = _put(document, key_path, value, text)
        overridden.add(key_path)
    _refuse_renamed(path, section, document, lines, overridden)
    for depth, key in enumerate(section):
        try:
            document = document[key]
        except (KeyError, IndexError, TypeError):
            where = _dotted(section[: depth + 1])
            raise ConfigError([Problem(str(path), where, "is missing", "Add this section.")]) from None
    unusable = [
        Problem(_place(path, (*section, *key_path), lines, overridden), _dotted((*section, *key_path)), what, to_do)
        for key_path, what, to_do in _unusable(document)
    ]
    if unusable:
        raise ConfigError(unusable)
    document = _with_cached_models(document, lambda key_path: _place(path, (*section, *key_path), lines, overridden))
    try:
        return _build(cls, document)
    except Exception as error:
        if not _is_refusal(error):
            raise
        problems = []
        for key_path, what, to_do in _refusals(error, cls, document):
            full = section + key_path
            problems.append(Problem(_place(path, full, lines, overridden), _dotted(full), what, to_do))
        raise ConfigError(problems) from error


def _with_cached_models(node: Any, place: Callable[[KeyPath], str], key_path: KeyPath = ()) -> Any:
    """The document with the directory of the cache for every `hf://ORG/NAME`, the id of a downloaded model."""
    if isinstance(node, dict):
        return {key: _with_cached_models(value, place, (*key_path, key)) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_cached_models(value, place, (*key_path, index)) for index, value in enumerate(node)]
    if not isinstance(node, str) or not node.startswith(HUB_PREFIX) or node.startswith(f"{HUB_PREFIX}datasets/"):
        return node
    found = cached_model(node)
    if found is None:
        what = f"{node} is not a model in the cache of huggingface_hub"
        raise ConfigError([Problem(place(key_path), _dotted(key_path), what, download_command(node))])
    return str(found)


def _refuse_renamed(
    path: Path, section: KeyPath, document: Any, lines: dict[KeyPath, int], overridden: set[KeyPath]
) -> None:
    """Refuse every old key in the section that is read, and name the new one."""
    problems = []
    for old, new in KEYS.items():
        key_path = (*section[:1], *_key_path(old)) if section[:1] == ("run",) else _key_path(old)  # "run": a manifest
        new_path = (*key_path[: len(key_path) - old.count(".") - 1], *_key_path(new))
        shared = min(len(section), len(new_path))
        if section[:shared] == new_path[:shared] and _has(document, key_path):
            what, to_do = "was renamed", f"Use {new}."
            problems.append(Problem(_place(path, key_path, lines, overridden), _dotted(key_path), what, to_do))
    if problems:
        raise ConfigError(problems)


def _has(document: Any, key_path: KeyPath) -> bool:
    for key in key_path:
        if not isinstance(document, dict) or key not in document:
            return False
        document = document[key]
    return True


def _build(cls: type[T], document: Any) -> T:
    # Through JSON, because pydantic's strict mode then accepts a list for a tuple and text for a path, and still
    # refuses "3" for 3. The dumps cannot fail: the YAML reader returns JSON types only.
    return TypeAdapter(cls).validate_json(json.dumps(document), strict=True, extra="forbid")


def _unusable(document: Any) -> Iterator[tuple[KeyPath, str, str]]:
    """(key path, what, what to do) of values that YAML can hold but no setting accepts."""
    if isinstance(document, dict):
        entries: Any = document.items()
    elif isinstance(document, list):
        entries = enumerate(document)
    else:
        entries = ()
        if isinstance(document, float) and not math.isfinite(document):
            yield (), f"{document} is not a finite number", "Write a finite number."
        elif isinstance(document, int) and abs(document) > _MAX_INTEGER:
            yield (), f"is an integer of {len(str(abs(document)))} digits", f"Write an integer up to {_MAX_INTEGER}."
        elif isinstance(document, str) and ("\0" in document or not _is_unicode(document)):
            yield (), f"{document!a} contains a NUL or a lone surrogate", "Remove it."
        elif document == "":
            yield (), "is an empty string", "Write a value, or remove the key."
    for key, value in entries:
        if key == "options":  # options of a file system (data.store) are passed on as they are
            continue
        yield from (((key, *rest), what, to_do) for rest, what, to_do in _unusable(value))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, ValidationError) or is_ours(error)


def _refusals(error: Exception, cls: type, document: Any) -> list[tuple[KeyPath, str, str]]:
    """(key path, what, what to do) of each reason why `document` is not a valid `cls`.

    A dataclass may raise its package's own error, which ends the validation without a key path, because pydantic
    locates only ValueError. So the parts are validated one by one: the innermost part that fails gives the key path.
    """
    if isinstance(error, ValidationError):
        return list(explain(error, cls, document))
    found: list[tuple[KeyPath, str, str]] = []
    for key_path, part_cls, part in parts(cls, document):
        try:
            _build(part_cls, part)
        except Exception as below:
            if not _is_refusal(below):
                raise
            found += [(key_path + rest, what, to_do) for rest, what, to_do in _refusals(below, part_cls, part)]
    return found or [((), str(error), "")]


def _read(path: Path) -> tuple[Any, dict[KeyPath, int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise ConfigError([Problem(str(path), "", f"cannot be read ({reason})", "Check the path.")]) from error
    try:
        return parse_document(text)
    except DuplicateKeyError as error:
        what = f"is given twice, in lines {error.first_line} and {error.line}"
        raise ConfigError([Problem(f"{path}:{error.line}", error.key, what, "Keep one of them.")]) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        what = f"is not valid YAML ({getattr(error, 'problem', None) or error})"
        raise ConfigError([Problem(where, "", what, "Check indentation, quotes and colons there.")]) from error


def _put(node: Any, key_path: KeyPath, value: Any, text: str) -> Any:
    """A copy of `node` with the value at the key path; missing mappings are created, list entries must exist."""
    if not key_path:
        return value
    head, rest = key_path[0], key_path[1:]
    if isinstance(node, list):
        if not isinstance(head, int) or head >= len(node):
            what = f"{head} is not an index of a list with {len(node)} entries"
            to_do = f"Use 0 to {len(node) - 1}, or override the whole list." if node else "Override the whole list."
            raise ConfigError([Problem("command line", text.partition("=")[0], what, to_do)])
        return [_put(entry, rest, value, text) if i == head else entry for i, entry in enumerate(node)]
    if node is not None and not isinstance(node, dict):
        what = f"{head!r} is below {node!r}, which is not a mapping"
        raise ConfigError([Problem("command line", text.partition("=")[0], what, "Shorten the key path.")])
    mapping = dict(node or {})
    mapping[str(head)] = _put(mapping.get(str(head)), rest, value, text)
    return mapping


def _key_path(dotted: str) -> KeyPath:
    return tuple(int(key) if key.isascii() and key.isdigit() and len(key) < 10 else key for key in dotted.split("."))


def _dotted(key_path: KeyPath) -> str:
    return ".".join(str(key) for key in key_path)


def _place(path: Path, key_path: KeyPath, lines: dict[KeyPath, int], overridden: set[KeyPath]) -> str:
    if any(key_path[: len(given)] == given for given in overridden):
        return "command line"
    for depth in range(len(key_path), 0, -1):  # a missing key is shown at the line of its parent
        if key_path[:depth] in lines:
            return f"{path}:{lines[key_path[:depth]]}"
    return str(path)
