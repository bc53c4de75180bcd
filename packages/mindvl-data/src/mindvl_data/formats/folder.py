# SPDX-License-Identifier: Apache-2.0
"""A folder of pictures with captions: NAME.txt beside NAME.jpg, or one captions.jsonl with `image` and `text`.

Captions are learned without a chat template, after the picture.
"""

from collections.abc import Iterator
from pathlib import Path

from mindvl_data.errors import DataError
from mindvl_data.formats.record import Records, SourceRecord, count_lines, extras, image_paths, read_json_lines
from mindvl_data.shards.tar import IMAGE_EXTENSIONS

CAPTIONS_NAME = "captions.jsonl"


def read_folder(path: Path, image_root: Path | None) -> Records:
    """Records of a folder, pictures in name order; subfolders included."""
    if not path.is_dir():
        raise DataError(f"folder does not exist. {path}. Name a folder of pictures.")
    captions = path / CAPTIONS_NAME
    if captions.is_file():
        root = path if image_root is None else image_root
        return Records(total=count_lines(captions), records=_read_captions(captions, root))
    pictures = [p for p in sorted(path.rglob("*")) if p.suffix[1:].lower() in IMAGE_EXTENSIONS]
    if not pictures:
        raise DataError(f"folder holds no picture ({', '.join(IMAGE_EXTENSIONS)}). {path}. Name another folder.")
    return Records(total=len(pictures), records=_read_pairs(path, pictures))


def _read_pairs(path: Path, pictures: list[Path]) -> Iterator[SourceRecord]:
    for picture in pictures:
        caption = picture.with_suffix(".txt")
        if not caption.is_file():
            raise DataError(f"picture has no caption. {picture}. Add {caption.name} beside it, or {CAPTIONS_NAME}.")
        try:
            text = caption.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError as error:
            raise DataError(f"text is not UTF-8: {error}. {caption}. Convert the file.") from error
        body = {"content": [{"type": "image"}, text], "id": picture.relative_to(path).as_posix()}
        yield SourceRecord(body=body, images=(picture,), where=str(picture))


def _read_captions(path: Path, root: Path) -> Iterator[SourceRecord]:
    for where, row in read_json_lines(path):
        if not isinstance(row.get("text"), str):
            raise DataError(f"row has no string `text`. {where}. Add the caption; conversations have format messages.")
        images = image_paths(row.get("image"), root, where)
        content = [*[{"type": "image"}] * len(images), row["text"]]
        yield SourceRecord(body={"content": content, **extras(row, ("image", "text"))}, images=images, where=where)
