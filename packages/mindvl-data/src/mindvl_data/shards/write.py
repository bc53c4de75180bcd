# SPDX-License-Identifier: Apache-2.0
"""Source files -> shards.

The first step of the data path: a format reads records, this file checks them and copies images byte for byte. The
shards depend only on the source and the options, not on the number of threads or on interruptions.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from mindvl_data.config import ImageConfig
from mindvl_data.errors import DataError, SampleError
from mindvl_data.formats.downloads import Downloads
from mindvl_data.formats.hub import PREFIX, HubDataset, open_dataset
from mindvl_data.formats.recognition import AUTO, recognize
from mindvl_data.formats.record import Item, Medium, Origin, RecordError, SourceRecord, Url
from mindvl_data.formats.registry import FORMATS, WEBDATASET
from mindvl_data.formats.webdataset import Pipeline, read_webdataset, webdataset_identity
from mindvl_data.samples import parse_sample
from mindvl_data.shards.atomic import write_atomically
from mindvl_data.shards.claim import claimed
from mindvl_data.shards.manifest import ORIGIN_NAME
from mindvl_data.shards.media import check_media, media_extension
from mindvl_data.shards.progress import Done, WriteMark, source_identity
from mindvl_data.shards.tar import EXCLUDED_NAME, MAX_MEMBER_BYTES, SHARD_PATTERN, WRITING_MARK, ShardWriter, shard_name
from mindvl_data.types import RawSample

_MOST_LISTED = 20  # invalid records in one message
_OWN_SHARDS = "shard-*.tar"  # file names of this writer; no other file is removed from an unfinished directory

WriteProgress = Callable[[int, int], None]  # (done, total) in records of the source
Members = list[tuple[str, bytes]]  # (member name without the key, content)


@dataclass(frozen=True, kw_only=True)
class Written:
    """The result of a write."""

    samples: int
    excluded: int  # invalid records, listed in excluded.jsonl


def write_shards(
    source: Path | str | HubDataset | Pipeline,
    out: Path | str,
    *,
    format: str = AUTO,
    image_root: Path | str | None = None,
    source_name: str | None = None,
    samples_per_shard: int = 10_000,
    workers: int = 1,
    skip_bad: bool = False,
    fresh: bool = False,
    allow_pipe: bool = False,
    fetch_urls: Path | str | None = None,
    progress: WriteProgress | None = None,
) -> Written:
    """Write the records of `source` as shards in the directory `out`.

    The file `writing` exists in `out` until the last shard is complete. Indexing refuses a directory that has it; the
    same call resumes after the last complete shard.

    Args:
        source: A file or directory, or a data set of the Hugging Face hub (formats/hub.py), whose revision is recorded; with
            format "webdataset" also an address, or an iterable of webdataset samples.
        out: Output directory; created if it is missing.
        format: One of `mindvl_data.formats.registry.FORMATS`, or "auto": see `formats.recognition.recognize`.
        image_root: Directory for relative image names; the directory of the source if None.
        source_name: Stored in each record; the name of `out` if None.
        samples_per_shard: Number of samples in a shard.
        workers: Number of threads; the shards do not depend on it.
        skip_bad: Exclude invalid records and list them in `excluded.jsonl`, instead of raising at the first one.
        fresh: Start over, even if an interrupted write could be resumed.
        allow_pipe: Run the shell commands of `pipe:` addresses (format "webdataset").
        fetch_urls: Directory for images at http(s) addresses, which are downloaded once; None refuses such images.
        progress: Called after each record.

    Raises:
        DataError: A record or image is invalid, `out` already holds shards or those of an interrupted write with
            another source or other options, or `out` is not writable.
    """
    out = Path(out)
    source, format, origin = _checked_source(source, format)
    image_root = None if image_root is None else Path(image_root)
    options = {
        "format": format,
        "image_root": None if image_root is None else str(image_root),
        "source_name": source_name or out.name,
        "samples_per_shard": samples_per_shard,
        "skip_bad": skip_bad,
    }
    try:
        if isinstance(source, str | Path) and format != WEBDATASET:
            identity, found = source_identity(Path(source)), FORMATS[format](Path(source), image_root)
        else:
            identity = webdataset_identity(source, allow_pipe=allow_pipe)
            found = read_webdataset(source, allow_pipe=allow_pipe)
        out.mkdir(parents=True, exist_ok=True)
        with claimed(out):
            mark = WriteMark(out, identity, options)
            done = _clear(out, mark, fresh)
            mark.save(done)
            shard_writer = _ShardSequenceWriter(out, mark, done, samples_per_shard)
            rows = islice(found.records, done.rows, None)
            downloads = None if fetch_urls is None else Downloads(Path(fetch_urls))
            prepare = partial(_prepared, source_name=source_name or out.name, downloads=downloads)
            written = _write_all(rows, shard_writer, prepare, workers, skip_bad, found.total, progress)
            if not written.samples:
                raise DataError(f"{source}: the source has no records. Specify another source.")
            _record_origin(out, origin)
            mark.remove()
    except OSError as error:
        raise DataError(
            f"{error.filename2 or error.filename or out}: the shards cannot be written: {error.strerror}. "
            "Free disk space or choose another directory; the same command resumes after the last complete shard."
        ) from error
    return written


def _checked_source(
    source: Path | str | HubDataset | Pipeline, format: str
) -> tuple[Path | str | Pipeline, str, HubDataset | None]:
    """The source to read, its format, and the data set of the hub that it belongs to."""
    if isinstance(source, str) and source.startswith(PREFIX):
        source = open_dataset(source)
    origin = source if isinstance(source, HubDataset) else None
    found = source.path if isinstance(source, HubDataset) else source
    if format == AUTO and isinstance(found, str | Path):
        found, format, _ = recognize(found)
    if format not in FORMATS:
        raise DataError(f"--format {format!r}: the format does not exist. Use one of auto, {', '.join(FORMATS)}.")
    if format != WEBDATASET and (not isinstance(found, str | Path) or not _exists(Path(found))):
        raise DataError(f"{found}: the source does not exist. Specify a file or directory.")
    return found, format, origin


def _exists(source: Path) -> bool:
    return any(source.parent.glob(source.name)) if "*" in source.name else source.exists()


def _record_origin(out: Path, origin: HubDataset | None) -> None:
    if origin is None:
        (out / ORIGIN_NAME).unlink(missing_ok=True)
    else:
        write_atomically(out / ORIGIN_NAME, json.dumps(origin.as_json()).encode())


def _clear(out: Path, mark: WriteMark, fresh: bool) -> Done:
    """Remove what an interrupted write left after its last complete shard; returns its progress."""
    is_unfinished = (out / WRITING_MARK).exists()
    own = sorted(out.glob(_OWN_SHARDS)) if is_unfinished else []
    if set(out.glob(SHARD_PATTERN)) - set(own):
        raise DataError(f"{out}: the directory already holds shards. Choose an empty directory, or remove them first.")
    done = Done() if fresh else mark.load()
    for number, path in enumerate(own[: done.shards]):
        if path.name != shard_name(number):
            raise DataError(f"{out}: {shard_name(number)} is missing. Restore it, or start over with --fresh.")
    if len(own) < done.shards:
        raise DataError(f"{out}: {shard_name(len(own))} is missing. Restore it, or start over with --fresh.")
    left = [path for name in (_OWN_SHARDS, WRITING_MARK) for path in out.glob(f".{name}.*partial")]
    for path in [*own[done.shards :], *left]:
        path.unlink()
    excluded = out / EXCLUDED_NAME
    if excluded.is_file():
        os.truncate(excluded, done.excluded_bytes)
        if not done.excluded_bytes:
            excluded.unlink()
    return done


def _prepared(item: Item, *, source_name: str, downloads: Downloads | None) -> Members | RecordError:
    try:
        return item if isinstance(item, RecordError) else _members(item, source_name, downloads)
    except RecordError as bad:
        return bad


def _write_all(
    rows: Iterable[Item],
    shard_writer: "_ShardSequenceWriter",
    prepare: Callable[[Item], Members | RecordError],
    workers: int,
    skip_bad: bool,
    total: int,
    progress: WriteProgress | None,
) -> Written:
    refused: list[RecordError] = []
    try:
        with ThreadPoolExecutor(workers) as pool:
            prepared = _in_order(pool, prepare, rows, 4 * workers) if workers > 1 else map(prepare, rows)
            for number, result in enumerate(prepared, shard_writer.rows + 1):
                if isinstance(result, RecordError) and not skip_bad:
                    refused.append(result)
                elif isinstance(result, RecordError):
                    shard_writer.exclude(result)
                elif not refused:  # after an invalid record the others are only checked
                    shard_writer.add(result)
                if progress is not None:
                    progress(number, total)
        if refused:
            raise _refusal(refused)
        return shard_writer.finish()
    finally:
        shard_writer.abort()


def _refusal(refused: list[RecordError]) -> DataError:
    if len(refused) == 1:
        first = refused[0]
        return RecordError(first.what, first.origin, f"{first.remedy} Or exclude it with --skip-bad.")
    listed = "; ".join(f"{bad.origin}: {bad.what}" for bad in refused[:_MOST_LISTED])
    remedy = refused[0].remedy if len({bad.remedy for bad in refused}) == 1 else "Correct them."
    more = f"; and {len(refused) - _MOST_LISTED} more" if len(refused) > _MOST_LISTED else ""
    return DataError(
        f"{refused[0].origin.file}: {len(refused)} records are invalid: {listed}{more}. {remedy} Or exclude and list them in "
        "excluded.jsonl with --skip-bad."
    )


class _ShardSequenceWriter:
    """Writes a stream of samples as shards of equal size, and records the progress after each shard."""

    def __init__(self, directory: Path, mark: WriteMark, done: Done, samples_per_shard: int) -> None:
        self._directory = directory
        self._mark = mark
        self._done = done
        self._samples_per_shard = samples_per_shard
        self._writer: ShardWriter | None = None
        self._excluded: list[str] = []
        self._samples = done.samples
        self.rows = done.rows

    def add(self, members: Members) -> None:
        if self._writer is None:
            self._writer = ShardWriter(self._directory / shard_name(self._done.shards))
        for name, content in members:
            self._writer.add(f"{self._samples:09d}.{name}", content)
        self._samples += 1
        self.rows += 1
        if self._samples % self._samples_per_shard == 0:
            self._commit()

    def exclude(self, bad: RecordError) -> None:
        row = {"file": str(bad.origin.file), "row": bad.origin.row, "reason": bad.what}
        self._excluded.append(json.dumps(row) + "\n")
        self.rows += 1

    def finish(self) -> Written:
        self._commit()
        return Written(samples=self._done.samples, excluded=self._done.excluded)

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()
            self._writer = None

    def _commit(self) -> None:
        """Commit the shard, then the progress file: shards that it does not count are removed at the next start."""
        lines = "".join(self._excluded).encode()
        if lines:
            with open(self._directory / EXCLUDED_NAME, "ab") as file:
                _append(file, lines)
        if self._writer is not None:
            self._writer.commit()
        self._done = replace(
            self._done,
            shards=self._done.shards + (self._writer is not None),
            rows=self.rows,
            samples=self._samples,
            excluded=self._done.excluded + len(self._excluded),
            excluded_bytes=self._done.excluded_bytes + len(lines),
        )
        self._writer, self._excluded = None, []
        self._mark.save(self._done)


def _append(file: BinaryIO, content: bytes) -> None:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def _in_order(
    pool: ThreadPoolExecutor, function: Callable[[Item], Members | RecordError], items: Iterable[Item], ahead: int
) -> Iterator[Members | RecordError]:
    """Apply `function` to items in threads; yields results in order, with at most `ahead` items in flight."""
    waiting: deque[Future[Members | RecordError]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _members(record: SourceRecord, source_name: str, downloads: Downloads | None) -> Members:
    """The members of one sample, checked as they are when they are read."""
    media = [_read_media(medium, record.origin, downloads) for medium in record.media]
    try:
        body = {"source": source_name, **record.body}
        content = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        sizes = tuple(check_media(medium, decode_limit=ImageConfig().decode_limit) for medium in media)
        parse_sample(RawSample(key="", record=content, is_json=True, media=tuple(media), sizes=sizes))
    except UnicodeEncodeError as error:
        surrogate = error.object[error.start]
        raise RecordError(
            f"the text contains the unpaired surrogate {surrogate!r}", record.origin, "Replace or remove it."
        ) from error
    except (SampleError, ValueError, RecursionError) as error:
        raise RecordError(str(error), record.origin) from error
    names = [f"{number}.{media_extension(medium)}" for number, medium in enumerate(media)]
    return [("json", content), *zip(names, media, strict=True)]


def _read_media(medium: Medium, origin: Origin, downloads: Downloads | None) -> bytes:
    if isinstance(medium, Url):
        name, content = f"image {medium.address[:120]}", _fetched(medium, origin, downloads)
    else:
        name = "image" if isinstance(medium, bytes) else f"image {medium}"
        try:
            content = medium if isinstance(medium, bytes) else medium.read_bytes()
        except OSError as error:
            raise RecordError(
                f"image {_shortened(error.filename)} cannot be read: {error.strerror}",
                origin,
                "Check the name; --image-root names the directory that names are relative to.",
            ) from error
    if len(content) > MAX_MEMBER_BYTES:
        raise RecordError(f"{name} has {len(content)} bytes, the limit is {MAX_MEMBER_BYTES}", origin)
    if media_extension(content) is None:
        kinds = "JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, mp4, mov, mkv, webm or avi"
        raise RecordError(f"{name} is not {kinds}", origin, "Convert it.")
    return content


def _shortened(name: str | Path | None) -> str:
    text = str(name)
    return text if len(text) <= 160 else f"{text[:80]}...{text[-60:]}"


def _fetched(medium: Url, origin: Origin, downloads: Downloads | None) -> bytes:
    if downloads is None:
        raise RecordError(
            f"image {medium.address[:120]} is an address", origin, "Allow downloads with --fetch-urls DIRECTORY."
        )
    try:
        return downloads.read(medium.address)
    except SampleError as error:
        raise RecordError(str(error), origin, "Check the address.") from error
