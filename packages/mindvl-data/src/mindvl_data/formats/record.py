# SPDX-License-Identifier: Apache-2.0
"""What every input format produces, and the reading they share.

Comes before the shard writer; errors name file and row.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """One record on its way into a shard."""

    body: dict[str, Any]  # what KEY.json will hold, see samples.py
    images: tuple[Path, ...]  # in the order in which the text mentions them
    where: str  # file and row, for error messages


@dataclass(frozen=True, kw_only=True)
class Records:
    """What a format found: the records, read one by one, and how many there are."""

    total: int  # for progress only; blank lines count
    records: Iterator[SourceRecord]


def count_lines(path: Path) -> int:
    """Lines of a file, without decoding it."""
    if not path.is_file():
        raise DataError(f"file does not exist. {path}. Name a JSON lines file.")
    with open(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b"")) + 1


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of each line that is not blank.

    Raises:
        DataError: A line is not a JSON object.
    """
    with open(path, encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path} row {number}"
                    yield where, parse_object(line, where)
        except UnicodeDecodeError as error:
            raise DataError(f"text is not UTF-8: {error}. {path}. Convert the file.") from error


def parse_object(text: str, where: str) -> dict[str, Any]:
    """One JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"broken JSON: {error}. {where}. Mend or remove the row.") from error
    return check_object(value, where)


def check_object(value: Any, where: str) -> dict[str, Any]:
    """The value, which has to be an object."""
    if not isinstance(value, dict):
        raise DataError(f"row is {type(value).__name__} instead of an object. {where}. Mend or remove the row.")
    return value


def image_paths(value: Any, root: Path, where: str) -> tuple[Path, ...]:
    """Paths of a string or a list of strings, below `root` unless absolute."""
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise DataError(f"images are {value!r}. {where}. Use a file name or a list of file names.")
    return tuple(root / name for name in names)


def extras(row: dict[str, Any], used: tuple[str, ...]) -> dict[str, Any]:
    """`id` and `meta` of a record: what the row says beyond what the format reads."""
    body: dict[str, Any] = {}
    if "id" in row:
        body["id"] = str(row["id"])
    meta = {key: value for key, value in row.items() if key not in (*used, "id", "meta")}
    meta |= row["meta"] if isinstance(row.get("meta"), dict) else {}
    return body | ({"meta": meta} if meta else {})
