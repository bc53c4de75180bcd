# SPDX-License-Identifier: Apache-2.0
"""Plain text as JSON lines with a field `text`; it is learned whole, without a chat template."""

from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError
from mindvl_data.formats.record import (
    Place,
    RecordError,
    Records,
    SourceRecord,
    count_lines,
    each_row,
    extras,
    read_json_lines,
)


def read_text(path: Path, image_root: Path | None) -> Records:
    """Records of a JSON lines file; there are no images, so `image_root` has to be None."""
    if image_root is not None:
        raise DataError(f"image root {image_root} given for text. {path}. Leave it out, or use another format.")
    return Records(total=count_lines(path), records=each_row(read_json_lines(path), _record))


def _record(place: Place, row: dict[str, Any]) -> SourceRecord:
    if not isinstance(row.get("text"), str):
        raise RecordError("row has no string `text`", place, "Is this a text file in JSON lines?")
    return SourceRecord(body={"content": row["text"], **extras(row, ("text",))}, media=(), place=place)
