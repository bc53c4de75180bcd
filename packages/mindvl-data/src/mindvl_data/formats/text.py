# SPDX-License-Identifier: Apache-2.0
"""Plain text as JSON lines with a field `text`; it is learned whole, without a chat template."""

from collections.abc import Iterator
from pathlib import Path

from mindvl_data.errors import DataError
from mindvl_data.formats.record import Records, SourceRecord, count_lines, extras, read_json_lines


def read_text(path: Path, image_root: Path | None) -> Records:
    """Records of a JSON lines file; there are no images, so `image_root` has to be None."""
    if image_root is not None:
        raise DataError(f"image root {image_root} given for text. {path}. Leave it out, or use another format.")
    return Records(total=count_lines(path), records=_records(path))


def _records(path: Path) -> Iterator[SourceRecord]:
    for where, row in read_json_lines(path):
        if not isinstance(row.get("text"), str):
            raise DataError(f"row has no string `text`. {where}. Is this a text file in JSON lines?")
        yield SourceRecord(body={"content": row["text"], **extras(row, ("text",))}, images=(), where=where)
