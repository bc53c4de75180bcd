# SPDX-License-Identifier: Apache-2.0
"""Recognize the format of a source by its files and its first record, for `--format auto`."""

import json
from pathlib import Path

from mindvl_data.errors import DataError
from mindvl_data.formats.classes import class_images
from mindvl_data.formats.conversation import is_table_row
from mindvl_data.formats.datasets import SPLITS, STATE
from mindvl_data.formats.foreign import ANSWER_FIELDS, CAPTION_FIELDS, QUESTION_FIELDS
from mindvl_data.formats.imagefolder import CAPTIONS_NAME
from mindvl_data.formats.record import RecordError, read_json
from mindvl_data.formats.table import named_media, table_header
from mindvl_data.shards.tar import MEDIA_EXTENSIONS, SHARD_PATTERN

AUTO = "auto"
_PACKED = (".7z", ".bz2", ".gz", ".rar", ".xz", ".zip", ".zst")
_TABLES = (".csv", ".tsv")
_METADATA = ("metadata.csv", "metadata.jsonl")
_ORIGINS = ("url", "path", "file", "filename", "filepath")
# Of LLaMA-Factory; the datasets library writes one of the same name into a directory.
DATASET_INFO = "dataset_info.json"


def recognize(source: Path | str) -> tuple[Path | str, str, str]:
    """Recognize a source.

    Returns:
        (source, format, reason): The source to read, which is a file of the given directory if that file describes it; one of
        `registry.FORMATS`; and why, as a clause: "the first record has `conversations`".

    Raises:
        DataError: The source does not exist or is none of the formats; the message names what was found.
    """
    text = str(source)
    if "://" in text or text.startswith("pipe:") or "{" in text or text.endswith((".tar", ".tar.gz", ".tgz")):
        return source, "webdataset", "it is an address, a pattern or a tar file"
    path = Path(source)
    if "*" in path.name and path.suffix == ".parquet":
        return path, "parquet", "the pattern names parquet files"
    if path.is_dir():
        return _of_directory(path)
    if not path.is_file():
        raise DataError(f"{path}: the source does not exist. Specify a file or directory.")
    if path.suffix == ".parquet":
        return path, "parquet", "the file is a parquet file"
    if path.suffix in _TABLES:
        names = table_header(path)
        if "question" in names and path.suffix == ".tsv" and {"image", "image_path"} & {*names}:
            return path, "tsv", "the table has the columns of VLMEvalKit"
        return path, "table", f"the file is a table with the columns {', '.join(names[:8])}"
    if path.name == DATASET_INFO:
        return _of_dataset_info(path)
    if path.suffix in (".json", ".jsonl"):
        return _of_records(path)
    if path.suffix in _PACKED:
        raise DataError(f"{path}: a {path.suffix} file is not read. Unpack it, and specify what was in it.")
    raise DataError(
        f"{path}: the format of a {path.suffix or 'nameless'} file is not recognized. Name it with --format, or use a .json, "
        ".jsonl, .csv, .tsv, .parquet or .tar file."
    )


def _of_records(path: Path) -> tuple[Path, str, str]:
    _, rows = read_json(path)
    first = next((row[1] for row in rows if not isinstance(row, RecordError)), None)
    if first is None:
        raise DataError(f"{path}: no record can be read. Correct the file.")
    if "conversations" in first:
        return path, "llava", "the first record has `conversations`"
    if "messages" in first:
        return path, "messages", "the first record has `messages`"
    if "instruction" in first and "output" in first:
        return path, "messages", "the first record has `instruction` and `output`"
    # `url` and the like are where a text comes from, if it has no other media
    media = [name for name in named_media(list(first)) if name.lower() not in _ORIGINS]
    if is_table_row(first) and (media or not set(first) & {"text"}):
        return path, "messages", f"the first record has {', '.join(f'`{name}`' for name in list(first)[:4])}"
    if set(first) & {"text"} and not set(first) & {"image", "images", "video", "videos"}:
        return path, "text", "the first record has `text` and no media"
    fields = ", ".join(map(repr, list(first)[:12])) or "no fields"
    raise DataError(
        f"{path}: the format is not recognized, the first record has {fields}. Use records with `messages`, `conversations`, "
        f"`instruction` and `output`, `text`, or the columns {', '.join(_columns())}."
    )


def _of_dataset_info(path: Path) -> tuple[Path, str, str]:
    """LLaMA-Factory's list of data sets: the file of the only one is read."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        files = {str(name): str(entry.get("file_name", "")) for name, entry in entries.items()}
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"{path}: is no list of data sets as in LLaMA-Factory ({error}). Specify a data file."
        ) from error
    local = {name: file for name, file in files.items() if (path.parent / file).is_file()}
    if len(local) != 1:
        listed = ", ".join(f"{name} ({file or 'no file_name'})" for name, file in list(files.items())[:8]) or "nothing"
        raise DataError(f"{path}: describes {listed}. Specify the file of one of them.")
    ((name, file),) = local.items()
    source, format_name, reason = _of_records(path.parent / file)
    return source, format_name, f"{path.name} describes {name}, and {reason}"


def _of_directory(path: Path) -> tuple[Path, str, str]:
    if (path / STATE).is_file() or (path / SPLITS).is_file():
        return path, "datasets", f"the directory has {STATE if (path / STATE).is_file() else SPLITS}"
    if any(path.rglob("*.parquet")):
        return path, "parquet", "the directory has parquet files"
    if any(path.glob(SHARD_PATTERN)):
        raise DataError(f"{path}: the directory already holds shards. Index it with `mindvl data index {path}`.")
    if (path / CAPTIONS_NAME).is_file():
        return path, "imagefolder", f"the directory has {CAPTIONS_NAME}"
    if (path / _METADATA[0]).is_file():
        return path / _METADATA[0], "table", f"the directory has {_METADATA[0]}"
    if (path / _METADATA[1]).is_file():
        source, format_name, reason = _of_records(path / _METADATA[1])
        return source, format_name, f"the directory has {_METADATA[1]}, and {reason}"
    if (path / DATASET_INFO).is_file():
        return _of_dataset_info(path / DATASET_INFO)
    media = (file for file in sorted(path.rglob("*")) if file.suffix[1:].lower() in MEDIA_EXTENSIONS)
    first = next(media, None)
    if first is not None and first.with_suffix(".txt").is_file():
        return path, "imagefolder", f"{first.name} has a caption beside it"
    files = [file for file in sorted(path.glob("*")) if file.suffix in (".json", ".jsonl", *_TABLES)]
    if len(files) == 1:
        only, format_name, reason = recognize(files[0])
        return Path(only), format_name, f"the directory has one data file, {files[0].name}, and {reason}"
    if files:
        names = ", ".join(file.name for file in files[:8])
        raise DataError(
            f"{path}: has {len(files)} data files ({names}{', ...' if len(files) > 8 else ''}). Specify one of them."
        )
    if class_images(path):
        return path, "classes", "its subdirectories hold images without captions"
    found = sorted({file.suffix or file.name for file in path.rglob("*") if file.is_file()})[:8]
    raise DataError(
        f"{path}: the format of the directory is not recognized, it has {', '.join(found) or 'no files'}. Add captions "
        f"(NAME.txt beside NAME.jpg), or specify one file. Columns that are read: {', '.join(_columns())}."
    )


def _columns() -> tuple[str, ...]:
    return (*QUESTION_FIELDS, *ANSWER_FIELDS, *CAPTION_FIELDS)
