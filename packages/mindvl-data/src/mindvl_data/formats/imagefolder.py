# SPDX-License-Identifier: Apache-2.0
"""A directory of images and videos with captions: NAME.txt beside NAME.jpg, or one captions.jsonl.

A row of captions.jsonl has `image` or `video` (a name or a list of names) and `text`. Captions are learned without a
chat template, after the image.
"""

from functools import partial
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
    media_paths,
    read_json_lines,
)
from mindvl_data.shards.tar import MEDIA_EXTENSIONS, VIDEO_EXTENSIONS

CAPTIONS_NAME = "captions.jsonl"


def read_imagefolder(path: Path, image_root: Path | None) -> Records:
    """Records of a directory, files in name order; subdirectories included."""
    if not path.is_dir():
        raise DataError(f"directory does not exist. {path}. Name a directory of images.")
    captions = path / CAPTIONS_NAME
    if captions.is_file():
        convert = partial(_captioned, path if image_root is None else image_root)
        return Records(total=count_lines(captions), records=each_row(read_json_lines(captions), convert))
    media = [p for p in sorted(path.rglob("*")) if p.suffix[1:].lower() in MEDIA_EXTENSIONS]
    if not media:
        raise DataError(f"directory holds no image ({', '.join(MEDIA_EXTENSIONS)}). {path}. Name another directory.")
    rows = ((Place(file), {"id": file.relative_to(path).as_posix()}) for file in media)
    return Records(total=len(media), records=each_row(rows, _pair))


def _pair(place: Place, row: dict[str, Any]) -> SourceRecord:
    file = Path(place.file)
    caption = file.with_suffix(".txt")
    kind = "video" if file.suffix[1:].lower() in VIDEO_EXTENSIONS else "image"
    if not caption.is_file():
        remedy = f"Add {caption.name} beside it, or {CAPTIONS_NAME}."
        raise RecordError("image has no caption" if kind == "image" else "video has no caption", place, remedy)
    try:
        text = caption.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise RecordError(f"text is not UTF-8: {error}", Place(caption), "Convert the file.") from error
    except OSError as error:
        raise RecordError(f"file cannot be read: {error.strerror}", Place(caption), "Check its rights.") from error
    return SourceRecord(body={"content": [{"type": kind}, text], **row}, media=(file,), place=place)


def _captioned(root: Path, place: Place, row: dict[str, Any]) -> SourceRecord:
    if not isinstance(row.get("text"), str):
        raise RecordError("row has no string `text`", place, "Add the caption; conversations have format messages.")
    images, videos = (media_paths(row.get(kind), root, place) for kind in ("image", "video"))
    content = [*[{"type": "image"}] * len(images), *[{"type": "video"}] * len(videos), row["text"]]
    body = {"content": content, **extras(row, ("image", "video", "text"))}
    return SourceRecord(body=body, media=images + videos, place=place)
