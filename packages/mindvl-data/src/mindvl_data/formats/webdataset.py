# SPDX-License-Identifier: Apache-2.0
"""WebDataset addresses and pipelines, read through the webdataset library.

An address is an argument of `wds.WebDataset`: a path or URL, braces for several shards, `::` between addresses, or
`pipe:` and a shell command. A pipeline is any iterable of undecoded samples, such as
`wds.WebDataset(...).select(...)`. The fields of a sample have the same meaning as the members of a shard
(shards/validation.py): one record, json or txt, and its media.
"""

import bz2
import gzip
import hashlib
import json
import lzma
import os
import re
import tarfile
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlparse

from mindvl_data.errors import DataError, SampleError, redact
from mindvl_data.formats.foreign import to_record
from mindvl_data.formats.record import Item, Origin, RecordError, Records, SourceRecord, extras
from mindvl_data.shards.tar import MAX_MEMBER_BYTES, SHARD_PATTERN, TEXT_EXTENSIONS, VIDEO_EXTENSIONS, Member
from mindvl_data.shards.validation import sort_members

Pipeline = Iterable[dict[str, Any]]

MAX_SHARDS = 1_000_000
_DECOMPRESSORS: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}  # by the first bytes of a compressed file
_READ_ERRORS = (OSError, EOFError, ValueError, ImportError, tarfile.TarError, zlib.error, lzma.LZMAError)
_SHAPE = ("messages", "content", "min_pixels", "max_pixels", "tools")


def shard_urls(source: str | Path, *, allow_pipe: bool) -> list[str]:
    """The addresses of the shards in a directory, or those that braces and `::` expand to.

    Args:
        source: A directory or an address.
        allow_pipe: Allow `pipe:` addresses, which run a shell command.

    Raises:
        DataError: webdataset is not installed, the braces are invalid, or a `pipe:` address is not allowed.
    """
    shardlists = _library().shardlists
    text = str(source)
    if os.path.isdir(text):  # False for an address that is longer than a file name may be
        urls = [str(path) for path in sorted(Path(text).glob(SHARD_PATTERN))]
    else:
        for first, last in re.findall(r"\{(-?\d+)\.\.(-?\d+)", text):
            if len(first) + len(last) > 20 or abs(int(last) - int(first)) >= MAX_SHARDS:
                raise DataError(
                    f"{redact(text)}: the braces expand to more than {MAX_SHARDS:,} shards. Use a smaller range."
                )
        try:
            urls = shardlists.expand_urls(text)
        except (ValueError, AssertionError) as error:
            raise DataError(f"{redact(text)}: the address cannot be expanded: {error}. Correct its braces.") from error
    if not urls:
        raise DataError(
            f"{redact(text)}: the directory has no {SHARD_PATTERN}. Specify shards, such as a-{{000..009}}.tar."
        )
    for url in urls:
        if urlparse(url).scheme == "pipe" and not allow_pipe:
            raise DataError(
                f"{redact(url)}: a pipe: address runs a shell command. If you trust it, allow it with --allow-pipe."
            )
    return urls


def webdataset_identity(source: str | Path | Pipeline, *, allow_pipe: bool) -> dict[str, Any]:
    """An identity of a source that needs no reading: addresses, sizes and times of local files.

    An interrupted write of a pipeline cannot resume, because a pipeline need not yield the same samples again.
    """
    if not isinstance(source, str | Path):
        return {"pipeline": uuid.uuid4().hex}
    digest, urls = hashlib.sha256(), shard_urls(source, allow_pipe=allow_pipe)
    for url in urls:
        path = Path(url.removeprefix("file:"))
        status = path.stat() if path.is_file() else None
        digest.update(f"{url}\0{status and (status.st_size, status.st_mtime_ns)}\n".encode("utf-8", "replace"))
    return {"shards": len(urls), "digest": digest.hexdigest()[:16]}


def read_webdataset(source: str | Path | Pipeline, *, allow_pipe: bool = False) -> Records:
    """Read the samples in their order; their number is not known in advance.

    Raises:
        DataError: As `shard_urls`; or, while reading, a shard is damaged or cannot be read.
    """
    if isinstance(source, str | Path):
        samples: Pipeline = samples_of(shard_urls(source, allow_pipe=allow_pipe))
    else:
        samples = source
    return Records(total=0, records=_records(samples))


def _library() -> Any:
    try:
        import webdataset
        import webdataset.shardlists
        import webdataset.tariterators
    except ImportError as error:
        raise DataError(
            "--format webdataset: the webdataset library is not installed. Install mindvl-data[webdataset]."
        ) from error
    return webdataset


def samples_of(urls: list[str]) -> Pipeline:
    """The undecoded samples of shards; damage, truncation and failed commands raise DataError."""
    groups = _library().tariterators.group_by_keys(_members(urls))
    while True:
        try:
            sample = next(groups, None)
        except ValueError as error:  # a duplicate member name in one sample
            raise DataError(f"{redact(urls[0])} and following: {error.args[0]}. Correct the shard.") from error
        if sample is None:
            return
        yield sample


def _members(urls: list[str]) -> Iterator[dict[str, Any]]:
    """The files of all shards as the library's `tar_file_expander` yields them, {} between two shards.

    Unlike `tar_file_expander`, it does not treat damage, truncation or a failed command as the end of a shard.
    """
    for url in urls:
        try:
            stream = _open(url)
            try:
                yield from _members_of(url, _Counted(stream))
            except BaseException:
                with suppress(OSError):  # a command that is stopped early exits with an error
                    stream.close()
                raise
            stream.close()  # raises if the command of the stream failed
        except _READ_ERRORS as error:
            what = f"the shard cannot be read: {type(error).__name__}: {error}"
            raise DataError(f"{redact(url)}: {what}. Check the address, or copy the shard again.") from error
        yield {}


def _open(url: str) -> BinaryIO:
    """Open an address with webdataset, or with fsspec for schemes that webdataset does not support, such as s3."""
    gopen = _library().gopen  # the function, which shadows the module of this name
    if urlparse(url).scheme in ("", "file", *_library().gopen_schemes):
        opened: BinaryIO = gopen(url)
        return opened
    import fsspec

    try:
        return fsspec.open(url, "rb").open()
    except Exception as error:  # any library below fsspec may raise its own errors
        raise DataError(
            f"{redact(url)}: the shard cannot be opened: {error}. Check the address and your permissions."
        ) from error


def _members_of(url: str, stream: "_Counted") -> Iterator[dict[str, Any]]:
    head = stream.read(6)
    stream.unread(head)
    for magic, unpack in _DECOMPRESSORS.items():
        if head.startswith(magic):
            stream = _Counted(unpack(stream, "rb"))
    readable: Any = stream
    with tarfile.open(fileobj=readable, mode="r|") as tar:
        for info in tar:
            if info.isdir():
                continue
            if not info.isreg() or info.issparse() or info.size > MAX_MEMBER_BYTES:
                why = f"has {info.size} bytes" if info.isreg() else f"is not a regular file (type {info.type!r})"
                raise DataError(
                    f"{redact(url)}: member {info.name!r} {why}. Use regular files of at most {MAX_MEMBER_BYTES} bytes."
                )
            if not re.match(r"__[^/]*__($|/)", info.name):  # metadata, which webdataset skips
                file = tar.extractfile(info)
                assert file is not None
                yield {"fname": info.name, "data": file.read(), "__url__": redact(url)}
            stream.num_read = 0
            tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header otherwise
        rest: Any = tar.fileobj  # the bytes after the end that tarfile found
        while block := rest.read(1 << 16):
            stream.num_read = 0
            if any(block):
                raise DataError(
                    f"{redact(url)}: damaged header, or data after the end-of-archive marker. Copy the shard again."
                )
    if stream.tail.strip(b"\0") or len(stream.tail) < 1024:
        raise DataError(f"{redact(url)}: truncated shard: the end-of-archive marker is missing. Copy the shard again.")


class _Counted:
    """A stream that keeps its last kilobyte and limits the bytes read per member."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pushed_back = b""
        self.num_read = 0  # since the last member
        self.tail = b""

    def read(self, size: int = -1) -> bytes:
        """Read `size` bytes; fewer only at the end of the stream."""
        content = self._pushed_back[: size if size >= 0 else None]
        self._pushed_back = self._pushed_back[len(content) :]
        while size < 0 or len(content) < size:
            more: bytes = self._stream.read(1 << 16 if size < 0 else size - len(content))
            if not more:
                break
            content += more
            self.num_read += len(more)
            if self.num_read > 2 * MAX_MEMBER_BYTES:
                raise ValueError(f"header: number of bytes must be at most {MAX_MEMBER_BYTES}, got {self.num_read}")
        self.tail = (self.tail + content)[-1024:]
        return content

    def unread(self, content: bytes) -> None:
        """Push bytes back, to be read again."""
        self._pushed_back, self.tail = content + self._pushed_back, b""


def _records(samples: Pipeline) -> Iterator[Item]:
    number = 0
    try:
        for number, sample in enumerate(samples, 1):
            if not isinstance(sample, dict) or not isinstance(sample.get("__key__"), str):
                raise DataError(
                    f"webdataset pipeline: sample {number} must be a dict with __key__, got {type(sample).__name__}. "
                    "Remove to_tuple, batched and similar steps from the pipeline."
                )
            origin = Origin(f"{redact(str(sample.get('__url__', 'pipeline')))}:{sample['__key__']}")
            try:
                yield _record(sample, origin)
            except RecordError as bad:
                yield bad
            except SampleError as error:
                yield RecordError(str(error), origin)
    except OSError as error:  # of the pipeline; the writer would report it as its own error
        raise DataError(f"webdataset pipeline after sample {number}: {error}. Check its shards.") from error


def _record(sample: dict[str, Any], origin: Origin) -> SourceRecord:
    fields = {name: value for name, value in sample.items() if not name.startswith("__")}
    contents = {name: _bytes(name, value, origin) for name, value in fields.items()}
    key, offset, members, whole = sample["__key__"], 0, [], b"".join(contents.values())
    for name, content in contents.items():
        members.append(Member(name=f"{key}.{name}", offset=offset, length=len(content)))
        offset += len(content)
    (record, *media), is_json = sort_members(members, whole)
    text = whole[record.offset : record.offset + record.length]
    kinds = ["video" if member.extension in VIDEO_EXTENSIONS else "image" for member in media]
    return SourceRecord(
        body=_body(key, text, is_json, kinds, origin),
        media=tuple(whole[member.offset : member.offset + member.length] for member in media),
        origin=origin,
    )


def _bytes(name: str, value: Any, origin: Origin) -> bytes:
    extension = name.rsplit(".", 1)[-1].lower()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if extension in TEXT_EXTENSIONS and isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if extension == "json" and isinstance(value, dict | list):
        try:
            return json.dumps(value).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(f"field {name!r} is not valid JSON: {error}", origin) from error
    raise RecordError(
        f"field {name!r} must be bytes, got {type(value).__name__}", origin, "Remove decode() from the pipeline."
    )


def _body(key: str, text: bytes, is_json: bool, kinds: list[str], origin: Origin) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8")) if is_json else text.decode("utf-8")
    except (ValueError, RecursionError) as error:
        raise RecordError(f"the record cannot be parsed: {error}", origin) from error
    if not is_json:
        return {"content": [*({"type": kind} for kind in kinds), value], "id": key}
    body = to_record(value, kinds)
    if not isinstance(body, dict) or not {"messages", "content"} & body.keys():
        raise RecordError("expected a conversation, a question with an answer, or a caption", origin)
    shape = {name: body[name] for name in _SHAPE if body.get(name) is not None}
    rest = {name: body[name] for name in ("id", "meta") if name in body}
    return {**shape, **extras({"id": key} | rest, ())}
