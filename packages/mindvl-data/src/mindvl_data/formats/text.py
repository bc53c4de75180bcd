# SPDX-License-Identifier: Apache-2.0
"""Plain text as JSON lines with a field `text`, trained on as a whole, without a chat template."""

from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError
from mindvl_data.formats.record import (
    Origin,
    RecordError,
    Records,
    SourceRecord,
    count_lines,
    each_row,
    extras,
    read_json_lines,
)


def read_text(path: Path, image_root: Path | None) -> Records:
    """Read a JSON lines file; there are no images, so `image_root` must be None."""
    if image_root is not None:
        raise DataError(
            f"--image-root {image_root}: format text has no images. Remove the option, or use another format."
        )
    return Records(total=count_lines(path), records=each_row(read_json_lines(path), _record))


def _record(origin: Origin, row: dict[str, Any]) -> SourceRecord:
    if not isinstance(row.get("text"), str):
        raise RecordError("the field `text` must be a string", origin, "Use JSON lines with the field `text`.")
    return SourceRecord(body={"content": row["text"], **extras(row, ("text",))}, media=(), origin=origin)
