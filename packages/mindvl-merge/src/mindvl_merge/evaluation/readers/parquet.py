# SPDX-License-Identifier: Apache-2.0
"""Rows of Hugging Face data sets in parquet, in the layouts that lmms-eval reads; several shards are one benchmark.

Comes before rows.py; needs the extra `parquet`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.benchmark import EmbeddedImage, ImageSource
from mindvl_merge.evaluation.readers.rows import IMAGE_COLUMNS, Place, Row, decode_image, find_image

_BATCH_ROWS = 256
_MAX_NUMBERED = 8  # image_1 to image_7 in MMMU


def read_parquet(paths: Sequence[Path]) -> tuple[list[str], list[tuple[Place, Row]]]:
    """Columns, and the rows of all shards in order.

    Raises:
        EvaluationError: pyarrow is not installed, or a file is damaged or empty.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise EvaluationError(
            f"{paths[0]}: pyarrow is not installed. Install it with pip install 'mindvl-merge[parquet]'."
        ) from error
    columns: list[str] = []
    rows: list[tuple[Place, Row]] = []
    for path in paths:
        try:
            with parquet.ParquetFile(path) as file:
                columns = columns or list(file.schema_arrow.names)
                number = 0
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    for row in batch.to_pylist():
                        number += 1
                        rows.append((Place(path=path, number=number, unit="row "), row))
        except (pyarrow.ArrowException, OSError) as error:
            raise EvaluationError(f"{path}: cannot be read as parquet ({error}). Copy the file again.") from error
    if not rows:
        raise EvaluationError(f"{paths[0]}: the benchmark is empty. Copy the file again.")
    return columns, rows


def images_of(row: Row, place: Place) -> Sequence[ImageSource]:
    """Images of a row: structs of bytes or path, lists of them, `image_1` to `image_7`, base64, or paths.

    Raises:
        EvaluationError: An image is neither.
    """
    numbered = [row.get(f"image_{number}") for number in range(1, _MAX_NUMBERED)]
    if any(value is not None for value in numbered):
        return [_image(value, place) for value in numbered if value is not None]
    # MathVista and MathVision name a file in `image` and have its content in `decoded_image`
    names = ("decoded_image", *IMAGE_COLUMNS) if row.get("decoded_image") is not None else IMAGE_COLUMNS
    value = next((row[name] for name in names if row.get(name) is not None), None)
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [_image(entry, place) for entry in values]


def _image(value: Any, place: Place) -> ImageSource:
    name = f"{place}: image"
    if isinstance(value, Mapping):
        if value.get("bytes"):
            return EmbeddedImage(name=name, content=value["bytes"])
        value = value.get("path")
    if isinstance(value, bytes) and value:
        return EmbeddedImage(name=name, content=value)
    if isinstance(value, str) and value:
        if len(value) <= 260 and "." in value[-6:]:
            return find_image(place.path.parent, place.path.stem, value, str(place))
        return decode_image(value, name)
    raise EvaluationError(f"{place}: the image has neither bytes nor a path. Write the data set with embedded images.")
