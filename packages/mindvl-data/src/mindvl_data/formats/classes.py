# SPDX-License-Identifier: Apache-2.0
"""A directory with one subdirectory of images for each class; the name of the subdirectory is the answer.

A record is one question and one answer: QUESTION, and the name with underscores as spaces.
"""

from functools import partial
from pathlib import Path
from typing import Any

from mindvl_data.errors import DataError
from mindvl_data.formats.record import Origin, Records, SourceRecord, each_row
from mindvl_data.shards.tar import IMAGE_EXTENSIONS

QUESTION = "What does the image show?"


def read_classes(path: Path, image_root: Path | None) -> Records:
    """Read the images of all classes in name order."""
    if image_root is not None:
        raise DataError(f"--image-root {image_root}: format classes has no file names. Remove the option.")
    images = class_images(path)
    if not images:
        raise DataError(f"{path}: no subdirectory with images was found. Specify a directory with one for each class.")
    rows = ((Origin(file), {"id": file.relative_to(path).as_posix()}) for file in images)
    return Records(total=len(images), records=each_row(rows, partial(_record, path)))


def class_images(path: Path) -> list[Path]:
    """The images in the subdirectories of a directory, at any depth."""
    files = (file for file in sorted(path.glob("*/**/*")) if file.suffix[1:].lower() in IMAGE_EXTENSIONS)
    return [file for file in files if file.is_file()]


def _record(root: Path, origin: Origin, row: dict[str, Any]) -> SourceRecord:
    file = Path(origin.file)
    label = file.relative_to(root).parts[0]
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": label.replace("_", " ")},
    ]
    return SourceRecord(body={"messages": messages, **row, "meta": {"class": label}}, media=(file,), origin=origin)
