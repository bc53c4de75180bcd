# SPDX-License-Identifier: Apache-2.0
"""Read JSON files of untrusted model directories with limits on size and depth and without duplicate keys.

Used by directory.py for headers and indexes and by hf/config_keys.py for configurations. mindvl_merge, which imports no
other mindvl package, has its own reader with the same rules.
"""

import json
from pathlib import Path
from typing import Any

from mindvl_model.errors import WeightError

MAX_JSON_BYTES = 25_000_000  # the densest JSON of this size takes less than 1 GB of memory when parsed
MAX_JSON_DEPTH = 50


def read_json(file: Path) -> Any:
    """Read and parse a JSON file.

    Raises:
        WeightError: The file is missing, damaged, too large or too deeply nested.
    """
    try:
        if not file.exists():
            raise WeightError(f"{file}: does not exist. Use a transformers model directory.")
        if not file.is_file():
            raise WeightError(f"{file}: not a regular file. Download the directory again.")
        if file.stat().st_size > MAX_JSON_BYTES:
            raise WeightError(
                f"{file}: must be at most {MAX_JSON_BYTES} bytes, got {file.stat().st_size}. Check the source of the "
                "directory."
            )
        content = file.read_bytes()
    except OSError as error:
        raise WeightError(f"{file}: cannot be read ({error.strerror}). Download the file again.") from error
    return parse_json(content, file)


def parse_json(content: bytes, file: Path) -> Any:
    """Parse bytes that were read from `file`, like `read_json`. The caller checks their number."""
    try:
        document = json.loads(content.decode(), object_pairs_hook=_without_repeated_keys)
        _refuse_depth(document)
    except (ValueError, RecursionError) as error:  # includes encodings other than UTF-8 and integers of 5,000 digits
        raise WeightError(f"{file}: not valid JSON ({str(error)[:200]}). Download the file again.") from error
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
