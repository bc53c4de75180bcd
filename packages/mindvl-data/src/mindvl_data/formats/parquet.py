# SPDX-License-Identifier: Apache-2.0
"""Hugging Face datasets as parquet files: one file, a directory of them, or a pattern of names in a directory.

Media columns are recognized by their type (`struct<bytes, path>`, as the datasets library writes them), or by their
name (`image`, `images`, `jpg`, `video`, ...) if they hold bytes or file names; each may be a list. The other columns are
converted by foreign.py: conversations, messages, texts, question and answer, or a caption.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError
from mindvl_data.formats.columns import column_record, media_columns, with_media_apart
from mindvl_data.formats.record import Origin, Records, Row, each_row

ROWS_AT_ONCE = 32  # few, because rows with images are large
# Names that the datasets library gives to files of splits.
_SPLIT = re.compile(r"(train|validation|valid|val|dev|test)\b")


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
    return Records(total=total, records=each_row(parquet_rows(paths), partial(column_record, root)))


def parquet_files(path: Path) -> list[Path]:
    """The file, the files of the directory, or those of the pattern (`train-*.parquet`), in name order.

    Raises:
        DataError: There is no file, or the directory has several splits, which must not be mixed.
    """
    if "*" in path.name:
        paths = sorted(path.parent.glob(path.name))
    else:
        paths = sorted(path.rglob("*.parquet")) if path.is_dir() else [path] if path.exists() else []
    if not paths:
        raise DataError(f"{path}: no parquet file found. Specify a .parquet file or a directory of them.")
    splits = {found[1]: file for file in paths if (found := _SPLIT.match(file.name))} if path.is_dir() else {}
    if len(splits) > 1:
        first = next(iter(splits))
        raise DataError(
            f"{path}: has files of the splits {', '.join(splits)}. Specify those of one split: "
            f"'{splits[first].parent}/{first}*.parquet'."
        )
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
                kinds = media_columns(file.schema_arrow)
                for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=row_groups):
                    for row in batch.to_pylist():
                        number += 1
                        yield Origin(path, number), with_media_apart(row, kinds)
        except (ValueError, OSError) as error:
            raise DataError(
                f"{path} after row {number}: the file cannot be read: {error}. Correct the file."
            ) from error
