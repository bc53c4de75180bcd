# SPDX-License-Identifier: Apache-2.0
"""CSV and TSV tables with a header: an image and a caption, or a question and an answer, in each row.

The column of the image holds a file name, an address or a data URL; columns.py and COLUMNS list the names. A file
metadata.csv of a Hugging Face image data set is such a table. The separator is that of the header: tab, comma or semicolon.
"""

import csv
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError
from mindvl_data.formats.columns import IMAGE_NAMES, VIDEO_NAMES, column_record, with_media_apart
from mindvl_data.formats.foreign import CAPTION_FIELDS
from mindvl_data.formats.record import Origin, RecordError, Records, Row, each_row, open_source

# Names of columns of image files beside IMAGE_NAMES, in lower case
FILE_COLUMNS = ("filepath", "file_name", "filename", "file", "path", "image_path", "img_path", "image_url", "url")
TITLE = "title"  # the caption in OpenCLIP's tables, if no other column is one


def read_table(path: Path, image_root: Path | None) -> Records:
    """Read a table; file names are relative to `image_root` or else to the directory of the file."""
    if not path.is_file():
        raise DataError(f"{path}: the file does not exist. Specify a CSV or TSV table.")
    convert = partial(column_record, path.parent if image_root is None else image_root)
    return Records(total=sum(1 for _ in _rows(path)), records=each_row(_rows(path), convert))


def table_header(path: Path) -> list[str]:
    """The names of the columns."""
    return _header(path)[0]


def named_media(header: list[str]) -> dict[str, str]:
    """The kind ("image" or "video") of each column with names of media, by name."""
    lower = {name: name.lower() for name in header}
    found = {name: "image" for name in header if lower[name] in IMAGE_NAMES}
    found |= {name: "video" for name in header if lower[name] in VIDEO_NAMES}
    if not found:
        found = {name: "image" for name in header if lower[name] in FILE_COLUMNS}
    return found


def _header(path: Path) -> tuple[list[str], str]:
    """The names of the columns, and the separator, which is the most frequent one in the first line."""
    with open_source(path) as file:
        line = file.readline(1 << 20).decode("utf-8-sig", "replace")
    separator = max("\t,;", key=line.count)
    return next(csv.reader([line], delimiter=separator), []), separator


def _rows(path: Path) -> Iterator[Row | RecordError]:
    header, separator = _header(path)
    kinds = named_media(header)
    renamed = {TITLE: "caption"} if not {*header} & {*CAPTION_FIELDS} else {}
    csv.field_size_limit(1 << 30)  # the default limit is less than one image as a data URL
    number = 0
    with open_source(path) as file:
        lines = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter=separator)
        try:
            next(lines, None)
            for number, values in enumerate(lines, 1):
                origin = Origin(path, number)
                if len(values) == len(header):
                    row = {renamed.get(name, name): value for name, value in zip(header, values, strict=True)}
                    yield origin, _without_empty(with_media_apart(row, kinds))
                elif values:
                    yield RecordError(f"expected {len(header)} fields as in the header, got {len(values)}", origin)
        except (csv.Error, UnicodeDecodeError) as error:
            what = "the text is not valid UTF-8" if isinstance(error, UnicodeDecodeError) else "invalid table"
            raise DataError(f"{path} after row {number}: {what} ({error}). Correct the file.") from error


def _without_empty(row: dict[str, Any]) -> dict[str, Any]:
    media = {kind: [value for value in values if value] for kind, values in row[""].items()}
    return {"": media, **{name: value for name, value in row.items() if name and value}}
