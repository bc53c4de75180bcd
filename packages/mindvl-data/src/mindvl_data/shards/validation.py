# SPDX-License-Identifier: Apache-2.0
"""Validate one shard: its valid samples, and the reason for every excluded one.

Comes after scan.py, before indexing.py. All checks that could fail during training are made here, except that pixels
are decoded only on request.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zlib_ng.zlib_ng import crc32

from mindvl_data.errors import DataError, SampleError
from mindvl_data.formats.foreign import states_its_media
from mindvl_data.samples import check_record_size, parse_sample
from mindvl_data.shards.index_format import MEMBER_DTYPE, SAMPLE_DTYPE, hash_key
from mindvl_data.shards.media import check_media
from mindvl_data.shards.scan import Content, Damage, map_shard, walk
from mindvl_data.shards.tar import BLOCK, MEDIA_EXTENSIONS, RECORD_EXTENSIONS, Member, split_name
from mindvl_data.types import MediaSize, RawSample

_MAX_U16, _MAX_U32 = (1 << 16) - 1, (1 << 32) - 1  # limits of the index format

Excluded = dict[str, Any]  # one line of excluded.jsonl: shard, key, offset, reason


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules by which a shard is validated."""

    decode_limit: int  # limit in pixels; a larger image is invalid
    exclude_bad: bool  # exclude invalid samples, instead of raising
    decode: bool  # decode every image and video


@dataclass(frozen=True, kw_only=True)
class ValidShard:
    """The result of validating a shard."""

    samples: NDArray[Any]  # SAMPLE_DTYPE
    members: NDArray[Any]  # MEMBER_DTYPE
    excluded: list[Excluded]
    sha256: str
    num_bytes: int


@dataclass
class _Group:
    """Consecutive members with the same key."""

    key: str
    offset: int  # of the first header
    members: list[Member] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)  # why the sample is invalid
    is_next_to_damage: bool = False  # a member may have been lost


def validate_shard(path: Path, rules: Rules) -> ValidShard:
    """Validate every header, record and image of a shard.

    Raises:
        DataError: A sample is invalid and `rules.exclude_bad` is False.
    """
    with map_shard(path) as content:
        found = list(walk(content))  # all headers first, so that damage is known before contents are parsed
        damage = [item for item in found if isinstance(item, Damage)]
        if damage and not rules.exclude_bad:
            raise damage[0].error(path)
        excluded = [_line(path, None, item.offset, item.what) for item in damage if item.key is None]
        table = _Table()
        for group in _groups(found):
            try:
                if group.reasons:
                    raise SampleError(group.reasons[0])
                table.add(group, content, rules)
            except SampleError as error:
                if not rules.exclude_bad:
                    raise _refusal(group, error, path) from error
                excluded.append(_line(path, group.key, group.offset, str(error)))
        if not table.samples and not excluded:
            if not rules.exclude_bad:
                raise DataError(f"{path}: the shard has no samples. Remove it.")
            excluded.append(_line(path, None, 0, "shard has no samples"))
        digest = hashlib.sha256(content).hexdigest()
        return ValidShard(
            samples=np.array(table.samples, SAMPLE_DTYPE),
            members=np.array(table.members, MEMBER_DTYPE),
            excluded=excluded,
            sha256=digest,
            num_bytes=len(content),
        )


class _Table:
    """The arrays of the index, built sample by sample."""

    def __init__(self) -> None:
        self.samples: list[tuple[Any, ...]] = []
        self.members: list[tuple[int, int, int, int, int, float]] = []

    def add(self, group: _Group, content: Content, rules: Rules) -> None:
        """Validate one sample and append it.

        Raises:
            SampleError: The sample is invalid.
        """
        members, is_json = sort_members(group.members, content)
        pieces = [content[m.offset : m.offset + m.length] for m in members]
        sizes = tuple(_size(m, piece, rules) for m, piece in zip(members[1:], pieces[1:], strict=True))
        raw = RawSample(key=group.key, record=pieces[0], is_json=is_json, media=tuple(pieces[1:]), sizes=sizes)
        sample = parse_sample(raw)
        if group.is_next_to_damage and not (is_json and states_its_media(json.loads(pieces[0]))):
            raise SampleError("it is next to a damaged part, and its record does not state how many images it has")
        crc = 0
        for piece in pieces:
            crc = crc32(piece, crc)
        start, stop = min(m.offset for m in members), max(m.offset + m.length for m in members)
        limits = sample.min_pixels or 0, sample.max_pixels or 0
        if len(members) > _MAX_U16 or max(stop - start, *limits) > _MAX_U32:
            raise SampleError(f"{len(members)} members in {stop - start} bytes are over the limits of the index format")
        row = (start, stop - start, len(self.members), len(members), sample.has_coordinates, is_json)
        self.samples.append((*row, hash_key(group.key), crc, *limits))
        for member, size in zip(members, (MediaSize(0, 0), *sizes), strict=True):
            self.members.append((member.offset, member.length, size.height, size.width, size.frames, size.fps))


def _groups(found: Iterable[Member | Damage]) -> list[_Group]:
    groups: list[_Group] = []
    is_next_to_damage = False
    for item in found:
        if item.key is None:
            is_next_to_damage = True
            if groups:
                groups[-1].is_next_to_damage = True
            continue
        if not groups or groups[-1].key != item.key:
            offset = item.offset if isinstance(item, Damage) else item.offset - BLOCK
            groups.append(_Group(key=item.key, offset=offset, is_next_to_damage=is_next_to_damage))
        if isinstance(item, Damage):
            groups[-1].reasons.append(item.what)
        else:
            groups[-1].members.append(item)
            is_next_to_damage = False
    _note_repeated_keys(groups)
    return groups


def _note_repeated_keys(groups: list[_Group]) -> None:
    """Mark complete samples with a repeated key as duplicates, and incomplete ones as ambiguous."""
    by_key: dict[str, list[_Group]] = {}
    for group in groups:
        by_key.setdefault(group.key, []).append(group)
    for key, same in by_key.items():
        if len(same) == 1:
            continue
        if all(any(m.extension in RECORD_EXTENSIONS for m in group.members) for group in same):
            for group in same[1:]:
                group.reasons.append(f"duplicate key {key!r}, already at byte {same[0].offset}")
        else:
            for group in same:
                group.reasons.append(f"its members are in {len(same)} separate parts of the shard")


def sort_members(members: Sequence[Member], content: Content) -> tuple[list[Member], bool]:
    """Sort the members of one sample: the record, then images and videos by number.

    Args:
        members: Members of one sample, in any order.
        content: The bytes that the offsets of the members refer to.

    Returns:
        The sorted members, and whether the record is JSON.

    Raises:
        SampleError: There is not exactly one record, or the extension of a member is not supported.
    """
    jsons = [m for m in members if m.extension == "json"]
    texts = [m for m in members if m.extension in RECORD_EXTENSIONS and m.extension != "json"]
    media = [m for m in members if m.extension in MEDIA_EXTENSIONS]
    for member in members:
        if member.extension not in RECORD_EXTENSIONS + MEDIA_EXTENSIONS:
            allowed = ", ".join(RECORD_EXTENSIONS + MEDIA_EXTENSIONS)
            raise SampleError(f"the extension of member {member.name!r} must be one of {allowed}")
    if len(jsons) == len(texts) == 1 and _is_metadata(jsons[0], content):
        jsons = []  # img2dataset: an image, its caption, and their metadata
    records = jsons + texts
    if len(records) != 1:
        raise SampleError(f"expected one record (json or txt), got {len(records)}")
    numbers = [_media_number(member, is_only=len(media) == 1) for member in media]
    if sorted(numbers) != list(range(len(media))):
        raise SampleError(f"images must be numbered 0, 1, ..., got {numbers}")
    in_order = [member for _, member in sorted(zip(numbers, media, strict=True), key=lambda pair: pair[0])]
    return records + in_order, bool(jsons)


def _is_metadata(member: Member, content: Content) -> bool:
    check_record_size(member.length)
    try:
        return not states_its_media(json.loads(content[member.offset : member.offset + member.length]))
    except (ValueError, RecursionError) as error:
        raise SampleError(f"record {member.name!r} cannot be parsed: {error}") from error


def _media_number(member: Member, *, is_only: bool) -> int:
    middle = split_name(member.name)[1].split(".")[:-1]
    if len(middle) == 1 and middle[0].isascii() and middle[0].isdigit():
        return int(middle[0][:9])
    if not middle or is_only:
        return 0  # KEY.jpg, as in plain webdataset shards
    raise SampleError(f"the name of member {member.name!r} is not KEY.NUMBER.EXTENSION")


def _size(member: Member, content: bytes, rules: Rules) -> MediaSize:
    try:
        return check_media(content, decode_limit=rules.decode_limit, decode_all=rules.decode)
    except SampleError as error:
        raise SampleError(f"{member.name!r}: {error}") from error


def _refusal(group: _Group, error: SampleError, path: Path) -> DataError:
    return DataError(
        f"{path} at byte {group.offset}: sample {group.key!r}: {error}. "
        "Write the shard again without it, or exclude invalid samples with --exclude-bad."
    )


def _line(path: Path, key: str | None, offset: int, reason: str) -> Excluded:
    return {"shard": path.name, "key": key, "offset": offset, "reason": reason}
