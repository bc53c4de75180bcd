# SPDX-License-Identifier: Apache-2.0
"""JSON of a model directory that somebody else wrote, read within bounds: size, depth, no key twice.

Comes before directory.py reads headers and indexes, and before hf/config_keys.py reads configurations. mindvl_merge, which
knows no other package of ours, has its own reader with the same rules.
"""

import json
from pathlib import Path
from typing import Any

from mindvl_model.errors import WeightError

MAX_JSON_BYTES = 25_000_000  # parsed, the densest JSON of this size stays below 1 GB
MAX_JSON_DEPTH = 50


def read_json(file: Path) -> Any:
    """What a JSON file holds.

    Raises:
        WeightError: There is none, or it is damaged, too large or too deep.
    """
    try:
        if not file.exists():
            raise WeightError(f"{file}: there is no such file. Name a transformers model directory.")
        if not file.is_file():
            raise WeightError(f"{file}: not a regular file. Fetch the directory again.")
        if file.stat().st_size > MAX_JSON_BYTES:
            raise WeightError(
                f"{file}: {file.stat().st_size} bytes are more than the {MAX_JSON_BYTES} that are read. "
                "Check where the directory is from."
            )
        content = file.read_bytes()
    except OSError as error:
        raise WeightError(f"{file}: cannot be read ({error.strerror}). Fetch the file again.") from error
    return parse_json(content, file)


def parse_json(content: bytes, file: Path) -> Any:
    """The same of bytes that were read from `file`; their number is checked by the caller."""
    try:
        document = json.loads(content.decode(), object_pairs_hook=_without_repeated_keys)
        _refuse_depth(document)
    except (ValueError, RecursionError) as error:  # also other encodings than UTF-8, and integers of 5,000 digits
        raise WeightError(f"{file}: not valid JSON ({str(error)[:200]}). Fetch the file again.") from error
    return document


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        repeated = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"key {repeated!r:.80} is repeated")
    return found


def _refuse_depth(document: Any) -> None:
    level = [document]
    for _ in range(MAX_JSON_DEPTH):
        containers = [one for one in level if isinstance(one, dict | list)]
        if not containers:
            return
        level = [value for one in containers for value in (one.values() if isinstance(one, dict) else one)]
    raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")
