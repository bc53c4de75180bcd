# SPDX-License-Identifier: Apache-2.0
"""Parse YAML safely: YAML 1.2 scalars, duplicate keys refused, the line of every key recorded.

Comes before load.py. Aliases are supported, but a document may not contain itself or exceed MAX_ENTRIES with them. Tags
other than those of the plain types (!!binary, !!timestamp, ...) are refused, because JSON has no such values. Scalars
follow the core schema of YAML 1.2, so that `1e-4` is a number, `no` is text and `2024-01-01` is not a date; underscores
in integers (`100_000`) are allowed.
Source: YAML 1.2.2, section 10.3.
"""

import re
from typing import Any

import yaml

_SCALARS = (
    # tag, pattern, possible first characters
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+.0123456789"),
    ),
)


MAX_CHARACTERS = 2 << 20  # of a document; PyYAML reads about 100 kB per second
MAX_ENTRIES = 100_000  # keys and list entries, counted again wherever an alias repeats them
MAX_DEPTH = 64  # levels of nesting
_MAX_DIGITS = 400  # of a number; Python refuses to read integers of more than 4,300


class DuplicateKeyError(Exception):
    """One mapping has the same key twice; YAML readers silently keep the last one."""

    def __init__(self, key: str, first_line: int, line: int) -> None:
        super().__init__(f"key {key!r} is given twice, in lines {first_line} and {line}")
        self.key, self.first_line, self.line = key, first_line, line


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name
    yaml_constructors = {  # noqa: RUF012 - likewise
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
    }


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


def parse_document(text: str) -> tuple[Any, dict[tuple[str | int, ...], int]]:
    """Read a document; returns it with the line (from 1) of every key path and list entry.

    Raises:
        yaml.YAMLError: It is not YAML, or is too large, too deep, or contains itself.
        DuplicateKeyError: A mapping has the same key twice.
    """
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"{len(text):,} characters are more than the {MAX_CHARACTERS:,} that are read")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        lines: dict[tuple[str | int, ...], int] = {}
        _note_lines(node, (), lines)
        return loader.construct_document(node), lines
    except RecursionError:
        raise yaml.YAMLError(f"more than {MAX_DEPTH} levels of nesting") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # !!int x, !!bool x and their like
        raise yaml.YAMLError(f"a value does not fit its tag ({str(error)[:100]})") from error
    finally:
        loader.dispose()


def parse_scalar(text: str) -> Any:
    """Read the value of an override; an empty value is None."""
    return parse_document(text)[0] if text.strip() else None


def _note_lines(node: yaml.Node, key_path: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int]) -> None:
    if len(key_path) > MAX_DEPTH:  # an alias that contains itself gets here too
        raise _refused(f"more than {MAX_DEPTH} levels of nesting, or an alias that contains itself", node)
    if len(lines) > MAX_ENTRIES:
        raise _refused(f"more than {MAX_ENTRIES:,} keys and list entries, counting aliases each time", node)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refused("a key that is a list or a mapping", key_node)
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen:
                raise DuplicateKeyError(".".join(map(str, (*key_path, key))), seen[key], line)
            seen[key] = lines[(*key_path, key)] = line
            _note_lines(value_node, (*key_path, key), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, entry in enumerate(node.value):
            lines[(*key_path, index)] = entry.start_mark.line + 1
            _note_lines(entry, (*key_path, index), lines)
    elif node.tag.endswith((":int", ":float")) and len(node.value) > _MAX_DIGITS:
        raise _refused(f"a number of {len(node.value):,} digits", node)


def _refused(what: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
