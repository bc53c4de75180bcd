# SPDX-License-Identifier: Apache-2.0
"""A directory of images and videos with captions: NAME.txt beside NAME.jpg, or one captions.jsonl.

A line of captions.jsonl has `image` or `video` (a name or a list of names) and `text`. Captions are trained on without
a chat template, after the image.
"""

from functools import partial
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
    media_paths,
    read_json_lines,
)
from mindvl_data.shards.tar import MEDIA_EXTENSIONS, VIDEO_EXTENSIONS

CAPTIONS_NAME = "captions.jsonl"


def read_imagefolder(path: Path, image_root: Path | None) -> Records:
    """Read the records of a directory and its subdirectories in name order.

    Args:
        path: The directory.
        image_root: Directory for relative names in captions.jsonl; `path` if None.
    """
    if not path.is_dir():
        raise DataError(f"{path}: the directory does not exist. Specify a directory of images.")
    captions = path / CAPTIONS_NAME
    if captions.is_file():
        convert = partial(_captioned, path if image_root is None else image_root)
        return Records(total=count_lines(captions), records=each_row(read_json_lines(captions), convert))
    media = [p for p in sorted(path.rglob("*")) if p.suffix[1:].lower() in MEDIA_EXTENSIONS]
    if not media:
        raise DataError(
            f"{path}: the directory has no images ({', '.join(MEDIA_EXTENSIONS)}). Specify another directory."
        )
    rows = ((Origin(file), {"id": file.relative_to(path).as_posix()}) for file in media)
    return Records(total=len(media), records=each_row(rows, record_of_pair))


def record_of_pair(origin: Origin, row: dict[str, Any]) -> SourceRecord:
    """An image or video with the caption in the .txt file beside it."""
    file = Path(origin.file)
    caption = file.with_suffix(".txt")
    kind = "video" if file.suffix[1:].lower() in VIDEO_EXTENSIONS else "image"
    if not caption.is_file():
        remedy = f"Add {caption.name} to its directory, or use {CAPTIONS_NAME}."
        raise RecordError(f"the {kind} has no caption", origin, remedy)
    try:
        text = caption.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise RecordError(
            f"the text is not valid UTF-8: {error}", Origin(caption), "Convert the file to UTF-8."
        ) from error
    except OSError as error:
        what = f"the file cannot be read: {error.strerror}"
        raise RecordError(what, Origin(caption), "Check its permissions.") from error
    return SourceRecord(body={"content": [{"type": kind}, text], **row}, media=(file,), origin=origin)


def _captioned(root: Path, origin: Origin, row: dict[str, Any]) -> SourceRecord:
    if not isinstance(row.get("text"), str):
        raise RecordError(
            "the field `text` must be a string", origin, "Add a caption; use --format messages for conversations."
        )
    images, videos = (media_paths(row.get(kind), root, origin) for kind in ("image", "video"))
    content = [*[{"type": "image"}] * len(images), *[{"type": "video"}] * len(videos), row["text"]]
    body = {"content": content, **extras(row, ("image", "video", "text"))}
    return SourceRecord(body=body, media=images + videos, origin=origin)
