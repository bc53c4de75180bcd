# SPDX-License-Identifier: Apache-2.0
"""Source files -> shards.

The first step of the line: a format reads records, this file checks them and copies pictures byte for byte. The same
input gives the same bytes.
"""

import json
from collections.abc import Callable
from pathlib import Path

from mindvl_data.errors import BadSample, DataError
from mindvl_data.formats import FORMATS, SourceRecord
from mindvl_data.samples import parse_record
from mindvl_data.shards.tar import SHARD_PATTERN, WRITING_MARK, ShardWriter

_OWN_SHARDS = "shard-*.tar"  # the names given here; of an unfinished folder no other file is removed
_SIGNATURES = ((b"\xff\xd8\xff", "jpg"), (b"\x89PNG\r\n\x1a\n", "png"))

WriteProgress = Callable[[int, int], None]  # (done, total) in samples


def write_shards(
    source: Path | str,
    out: Path | str,
    *,
    format: str,
    image_root: Path | str | None = None,
    source_name: str | None = None,
    samples_per_shard: int = 10_000,
    progress: WriteProgress | None = None,
) -> int:
    """Write the records of `source` as shards in folder `out`; returns how many.

    A file `writing` lies in `out` until the last shard is whole. A folder that has it was left unfinished: indexing
    refuses it, and writing starts over by removing its `shard-*.tar`.

    Args:
        format: One of `mindvl_data.formats.FORMATS`.
        image_root: Where relative image names start; the source's own folder when None.
        source_name: Kept in each record; the name of `out` when None.

    Raises:
        DataError: A record or picture cannot be used (named by file and row), or `out` holds shards already.
    """
    source, out = Path(source), Path(out)
    if format not in FORMATS:
        raise DataError(f"format {format!r} does not exist. data write. Use one of {', '.join(FORMATS)}.")
    mark = out / WRITING_MARK
    unfinished = [*out.glob(_OWN_SHARDS), *out.glob(f".{_OWN_SHARDS}.partial")] if mark.exists() else []
    if set(out.glob(SHARD_PATTERN)) - set(unfinished):
        raise DataError(f"folder holds shards already. {out}. Name an empty folder, or remove them first.")
    found = FORMATS[format](source, None if image_root is None else Path(image_root))
    out.mkdir(parents=True, exist_ok=True)
    mark.write_text("The shards here are not complete: `mindvl data write` is at work or was stopped.\n")
    for path in unfinished:
        path.unlink()
    name = source_name or out.name
    writer: ShardWriter | None = None
    count = 0
    try:
        for record in found.records:
            if writer is None:
                writer = ShardWriter(out / f"shard-{count // samples_per_shard:06d}.tar")
            _write_sample(writer, f"{count:09d}", record, name)
            count += 1
            if count % samples_per_shard == 0:
                writer.commit()
                writer = None
            if progress is not None:
                progress(count, found.total)
        if writer is not None:
            writer.commit()
            writer = None
    finally:
        if writer is not None:
            writer.abort()
    if not count:
        raise DataError(f"no record. {source}. Name a source that holds samples.")
    mark.unlink()
    return count


def _write_sample(writer: ShardWriter, key: str, record: SourceRecord, source_name: str) -> None:
    try:
        parse_record(record.body, num_images=len(record.images))
    except BadSample as error:
        raise DataError(f"{error}. {record.where}. Mend or remove the row.") from error
    pictures = [_read_picture(path, record.where) for path in record.images]
    body = {"source": source_name, **record.body}
    try:
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"text holds {error.object[error.start]!r}, half of a character pair. {record.where}. Mend or remove it."
        ) from error
    writer.add(f"{key}.json", content)
    for number, (picture, extension) in enumerate(pictures):
        writer.add(f"{key}.{number}.{extension}", picture)


def _read_picture(path: Path, where: str) -> tuple[bytes, str]:
    """The bytes of a picture and the extension that they, not its name, ask for."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"picture {path} cannot be read: {error.strerror}. {where}. Check the image root.") from error
    for signature, extension in _SIGNATURES:
        if content.startswith(signature):
            return content, extension
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return content, "webp"
    raise DataError(f"picture {path} is neither JPEG, PNG nor WebP. {where}. Convert it.")
