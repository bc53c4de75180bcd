# SPDX-License-Identifier: Apache-2.0
"""Rows of VLMEvalKit's TSV files: one question a row, images in base64, as paths, or as the index of another row.

Comes before rows.py. Only empty cells are missing; VLMEvalKit also drops cells such as `None` and `NA`.
"""

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.benchmark import ImageSource
from mindvl_merge.evaluation.metrics.options import read_list
from mindvl_merge.evaluation.readers.rows import MAX_REFERENCE_LENGTH, Place, Row, decode_image, find_image


def read_tsv(path: Path) -> tuple[list[str], list[tuple[Place, Row]]]:
    """Columns, and the rows with the line where each begins.

    Raises:
        EvaluationError: The file is not UTF-8, has no row, or a row has too many or too few cells.
    """
    problems: list[str] = []
    rows: list[tuple[Place, Row]] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            columns = _read(path, file, rows, problems)
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path}: is not UTF-8 ({error.reason}). Convert the file.") from error
    except csv.Error as error:
        raise EvaluationError(f"{path}: is not a table of tab-separated values ({error}). Write it again.") from error
    if problems:
        raise EvaluationError(*problems)
    if not rows:
        raise EvaluationError(f"{path}: the benchmark is empty. Write one question per row.")
    return columns, rows


def _read(path: Path, file: Iterator[str], rows: list[tuple[Place, Row]], problems: list[str]) -> list[str]:
    previous = csv.field_size_limit(sys.maxsize)  # images are longer than the default; the limit is global
    try:
        reader = csv.reader(file, delimiter="\t")
        columns = next(reader, [])
        line = reader.line_num + 1
        for cells in reader:
            place = Place(path=path, number=line)
            line = reader.line_num + 1
            if not any(cells):
                continue
            if len(cells) != len(columns):
                problems.append(f"{place}: has {len(cells)} cells for {len(columns)} columns. Write the row again.")
            rows.append((place, dict(zip(columns, cells, strict=False))))
        return columns
    finally:
        csv.field_size_limit(previous)


def images_of(row: Row, place: Place, by_index: Mapping[str, str]) -> Sequence[ImageSource]:
    """Images of a row; none if its cells are empty.

    Args:
        by_index: The image cell of every row, by its index.

    Raises:
        EvaluationError: Base64 is broken, or a path or an index does not exist.
    """
    cell = str(row.get("image") or "")
    if 0 < len(cell) <= MAX_REFERENCE_LENGTH and not cell.startswith("["):
        target = by_index.get(cell, "")
        if len(target) <= MAX_REFERENCE_LENGTH:
            raise EvaluationError(
                f"{place}: image {cell!r} is not the index of a row with an image. Correct the index or embed the image."
            )
        cell = target
    if cell:
        listed = read_list(cell)
        texts = [cell] if listed is None else [str(text) for text in listed]
        return [decode_image(text, f"{place}: image {number}") for number, text in enumerate(texts, start=1)]
    names = str(row.get("image_path") or "")
    listed = read_list(names)
    paths = [] if not names else [names] if listed is None else [str(name) for name in listed]
    return [find_image(place.path.parent, place.path.stem, name, str(place)) for name in paths]
