# SPDX-License-Identifier: Apache-2.0
"""Hugging Face datasets as parquet files, one file or a directory of them.

Media columns are recognized by their type (`struct<bytes, path>`, as the datasets library writes them), or by their
name (`image`, `images`, `jpg`, `video`, ...) if they hold bytes or file names; each may be a list. The other columns are
converted by foreign.py: conversations, messages, texts, question and answer, or a caption.
"""

import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError
from mindvl_data.formats.foreign import ANSWER_FIELDS, CAPTION_FIELDS, QUESTION_FIELDS, to_record
from mindvl_data.formats.record import (
    Origin,
    RecordError,
    Records,
    Row,
    SourceRecord,
    each_row,
    extras,
    media_in_order,
    media_paths,
)

IMAGE_NAMES = ("image", "images", "img", "jpg", "jpeg", "png", "webp", "picture", "pictures")  # names in other datasets
VIDEO_NAMES = ("video", "videos", "mp4")
ROWS_AT_ONCE = 32  # few, because rows with images are large

CONTENT_FIELDS = (*QUESTION_FIELDS, *ANSWER_FIELDS, *CAPTION_FIELDS)

_USED = ("messages", "conversations", "texts", *CONTENT_FIELDS)


def read_parquet(path: Path, image_root: Path | None) -> Records:
    """Read the files in name order; file names in columns are relative to `image_root` or else to the directory.

    Raises:
        DataError: pyarrow is not installed, or a file is not a parquet file.
    """
    parquet = _library()
    paths = parquet_files(path)
    total = 0
    for file in paths:
        try:
            total += parquet.read_metadata(file).num_rows
        except (ValueError, OSError) as error:  # the base classes of pyarrow's errors
            raise DataError(f"{file}: not a parquet file ({error}). Correct or remove the file.") from error
    root = image_root or (path if path.is_dir() else path.parent)
    return Records(total=total, records=each_row(parquet_rows(paths), partial(record_of_row, root)))


def parquet_files(path: Path) -> list[Path]:
    """The file, or the files of the directory in name order."""
    paths = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not paths or not path.exists():
        raise DataError(f"{path}: no parquet file found. Specify a .parquet file or a directory of them.")
    return paths


def _library() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("--format parquet: pyarrow is not installed. Install mindvl-data[parquet].") from error
    return pyarrow.parquet


def parquet_rows(paths: Sequence[Path], row_groups: Sequence[int] | None = None) -> Iterator[Row]:
    """Yield each row with its media columns collected, by kind, under the empty name, which no column can have.

    Args:
        row_groups: Numbers of the row groups to read; all of them if None.
    """
    parquet = _library()
    for path in paths:
        number = 0
        try:
            with parquet.ParquetFile(path) as file:
                kinds = {field.name: kind for field in file.schema_arrow if (kind := _media_kind(field))}
                for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=row_groups):
                    for row in batch.to_pylist():
                        number += 1
                        media = {kind: [row[name] for name in kinds if kinds[name] == kind] for kind in kinds.values()}
                        rest = {name: value for name, value in row.items() if name not in kinds and value is not None}
                        yield Origin(path, number), {"": media, **rest}
        except (ValueError, OSError) as error:
            raise DataError(
                f"{path} after row {number}: the file cannot be read: {error}. Correct the file."
            ) from error


def _media_kind(field: Any) -> str | None:
    name, type_ = field.name.lower(), field.type
    while hasattr(type_, "value_type"):
        type_ = type_.value_type
    children = {type_.field(n).name for n in range(type_.num_fields)} if hasattr(type_, "num_fields") else set()
    named = str(type_) in ("string", "large_string", "binary", "large_binary") and name in IMAGE_NAMES + VIDEO_NAMES
    if children >= {"bytes", "path"} or named:
        return "video" if "video" in name or name in VIDEO_NAMES else "image"
    return None


def record_of_row(root: Path, origin: Origin, row: dict[str, Any]) -> SourceRecord:
    """Convert one row of `parquet_rows`; relative file names are joined to `root`."""
    media = {kind: flat_media(values, root, origin) for kind, values in row[""].items()}
    images, videos = media.get("image", ()), media.get("video", ())
    texts = {name: _parsed(value) if name in _USED else value for name, value in row.items() if name}
    body = to_record(texts, ["image"] * len(images) + ["video"] * len(videos))
    if not isinstance(body, dict) or not {"messages", "content"} & body.keys():
        columns = ", ".join(texts) or "empty"
        raise RecordError(
            f"expected a conversation, a question with an answer, or a caption, got the columns {columns}", origin
        )
    shape = {name: body[name] for name in ("messages", "content") if name in body}
    rest = {name: value for name, value in texts.items() if name not in _USED and (name == "tools" or _is_plain(value))}
    body = {**shape, **extras(rest, ())}
    return SourceRecord(body=body, media=media_in_order(body, images, videos, origin), origin=origin)


def flat_media(values: list[Any], root: Path, origin: Origin) -> tuple[Path | bytes, ...]:
    """The media of a row, in which columns may hold bytes, names, structs of them, or lists."""
    found: list[Path | bytes] = []
    for value in values:
        if isinstance(value, list):
            found += flat_media(value, root, origin)
        elif isinstance(value, dict):
            found += flat_media([value["path"] if value.get("bytes") is None else value["bytes"]], root, origin)
        elif isinstance(value, bytes):
            found.append(value)
        else:
            found += media_paths(value, root, origin)
    return tuple(found)


def _parsed(value: Any) -> Any:
    """Parse a conversation that is stored as one JSON string, as some tables do."""
    if isinstance(value, str) and value[:2] in ("[{", "[ ", "[\n"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
