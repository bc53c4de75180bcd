# SPDX-License-Identifier: Apache-2.0
"""A data set that the Hugging Face datasets library wrote with `save_to_disk`: arrow files and state.json.

pyarrow reads the files; the datasets library is not needed. Columns are converted as those of parquet files.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError
from mindvl_data.formats.columns import column_record, media_columns, with_media_apart
from mindvl_data.formats.record import Origin, Records, Row, each_row

STATE, SPLITS = "state.json", "dataset_dict.json"
_ROWS_AT_ONCE = 32


def read_datasets(path: Path, image_root: Path | None) -> Records:
    """Read the arrow files in the order of state.json.

    Raises:
        DataError: The directory is no saved data set, it has several splits, or pyarrow is not installed.
    """
    ipc = _library()
    files = _files(path)
    total = 0
    for file in files:
        with _opened(ipc, file) as reader:
            total += sum(batch.num_rows for batch in reader)
    convert = partial(column_record, image_root or path)
    return Records(total=total, records=each_row(_rows(ipc, files), convert))


def _files(path: Path) -> list[Path]:
    if (path / SPLITS).is_file():
        splits = ", ".join(sorted(file.parent.name for file in path.glob(f"*/{STATE}")))
        raise DataError(f"{path}: holds the splits {splits}. Specify the directory of one split.")
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except OSError as error:
        raise DataError(f"{path / STATE}: cannot be read: {error.strerror}. Specify a saved data set.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path / STATE}: is damaged ({error!r}). Save the data set again.") from error
    if any("/" in name for name in names):
        raise DataError(f"{path / STATE}: names a file of another directory. Save the data set again.")
    if state.get("_indices_data_files"):
        raise DataError(f"{path}: selects rows by indices. Call flatten_indices() and save the data set again.")
    return [path / name for name in names]


def _library() -> Any:
    try:
        import pyarrow.ipc
    except ImportError as error:
        raise DataError("--format datasets: pyarrow is not installed. Install mindvl-data[parquet].") from error
    return pyarrow.ipc


def _opened(ipc: Any, file: Path) -> Any:
    try:
        return ipc.open_stream(str(file))
    except (ValueError, OSError) as error:
        raise DataError(f"{file}: the arrow file cannot be read ({error}). Save the data set again.") from error


def _rows(ipc: Any, files: list[Path]) -> Iterator[Row]:
    for file in files:
        number = 0
        try:
            with _opened(ipc, file) as reader:
                kinds = media_columns(reader.schema)
                for batch in reader:
                    for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                        for row in batch.slice(start, _ROWS_AT_ONCE).to_pylist():
                            number += 1
                            yield Origin(file, number), with_media_apart(row, kinds)
        except (ValueError, OSError) as error:
            raise DataError(
                f"{file} after row {number}: the file cannot be read: {error}. Save the data set again."
            ) from error
