# SPDX-License-Identifier: Apache-2.0
"""One shard -> the samples that can be used, and why each of the others cannot.

Comes after scan.py, before indexing.py. Everything a sample could fail on later is tried here, apart from pixels, which
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
from mindvl_data.formats.foreign import says_its_media
from mindvl_data.samples import check_record_size, parse_sample
from mindvl_data.shards.index_format import MEMBER_DTYPE, SAMPLE_DTYPE, hash_key
from mindvl_data.shards.media import check_media
from mindvl_data.shards.scan import Content, Damage, map_shard, walk
from mindvl_data.shards.tar import BLOCK, MEDIA_EXTENSIONS, RECORD_EXTENSIONS, Member, split_name
from mindvl_data.types import MediaSize, RawSample

_MAX_U16, _MAX_U32 = (1 << 16) - 1, (1 << 32) - 1  # what the index can hold

Excluded = dict[str, Any]  # one line of excluded.jsonl: shard, key, offset, reason


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How strictly a shard is looked at."""

    decode_limit: int  # pixels; an image that claims more is refused
    exclude_bad: bool  # name what cannot be used, instead of refusing the shard
    decode: bool  # decode every image and video


@dataclass(frozen=True, kw_only=True)
class ValidShard:
    """What a shard holds."""

    samples: NDArray[Any]  # SAMPLE_DTYPE
    members: NDArray[Any]  # MEMBER_DTYPE
    excluded: list[Excluded]
    sha256: str
    num_bytes: int


@dataclass
class _Group:
    """Members that share a key and stand together."""

    key: str
    offset: int  # of the first header
    members: list[Member] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)  # why it cannot be used
    is_beside_damage: bool = False  # a member of it may have been lost


def validate_shard(path: Path, rules: Rules) -> ValidShard:
    """Look at every header, record and image of a shard.

    Raises:
        DataError: Something cannot be used, unless such samples are excluded.
    """
    with map_shard(path) as content:
        found = list(walk(content))  # all headers first: damage is found before contents are believed
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
                raise DataError(f"shard holds no sample. {path}. Remove it.")
            excluded.append(_line(path, None, 0, "shard holds no sample"))
        digest = hashlib.sha256(content).hexdigest()
        return ValidShard(
            samples=np.array(table.samples, SAMPLE_DTYPE),
            members=np.array(table.members, MEMBER_DTYPE),
            excluded=excluded,
            sha256=digest,
            num_bytes=len(content),
        )


class _Table:
    """The rows of the index, as they grow."""

    def __init__(self) -> None:
        self.samples: list[tuple[Any, ...]] = []
        self.members: list[tuple[int, int, int, int, int, float]] = []

    def add(self, group: _Group, content: Content, rules: Rules) -> None:
        """Check one sample and append it.

        Raises:
            SampleError: It cannot be used.
        """
        members, is_json = sort_members(group.members, content)
        pieces = [content[m.offset : m.offset + m.length] for m in members]
        sizes = tuple(_size(m, piece, rules) for m, piece in zip(members[1:], pieces[1:], strict=True))
        raw = RawSample(key=group.key, record=pieces[0], is_json=is_json, media=tuple(pieces[1:]), sizes=sizes)
        sample = parse_sample(raw)
        if group.is_beside_damage and not (is_json and says_its_media(json.loads(pieces[0]))):
            raise SampleError("it stands beside a damaged place, and its text does not say how many images it has")
        crc = 0
        for piece in pieces:
            crc = crc32(piece, crc)
        start, stop = min(m.offset for m in members), max(m.offset + m.length for m in members)
        limits = sample.min_pixels or 0, sample.max_pixels or 0
        if len(members) > _MAX_U16 or max(stop - start, *limits) > _MAX_U32:
            raise SampleError(f"{len(members)} members in {stop - start} bytes are more than an index can hold")
        row = (start, stop - start, len(self.members), len(members), sample.has_coordinates, is_json)
        self.samples.append((*row, hash_key(group.key), crc, *limits))
        for member, size in zip(members, (MediaSize(0, 0), *sizes), strict=True):
            self.members.append((member.offset, member.length, size.height, size.width, size.frames, size.fps))


def _groups(found: Iterable[Member | Damage]) -> list[_Group]:
    groups: list[_Group] = []
    is_beside_damage = False
    for item in found:
        if item.key is None:
            is_beside_damage = True
            if groups:
                groups[-1].is_beside_damage = True
            continue
        if not groups or groups[-1].key != item.key:
            offset = item.offset if isinstance(item, Damage) else item.offset - BLOCK
            groups.append(_Group(key=item.key, offset=offset, is_beside_damage=is_beside_damage))
        if isinstance(item, Damage):
            groups[-1].reasons.append(item.what)
        else:
            groups[-1].members.append(item)
            is_beside_damage = False
    _note_repeated_keys(groups)
    return groups


def _note_repeated_keys(groups: list[_Group]) -> None:
    """A whole sample whose key came before is a duplicate; parts in several places belong to nobody for sure."""
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
                group.reasons.append(f"its members stand in {len(same)} places of the shard")


def sort_members(members: Sequence[Member], content: Content) -> tuple[list[Member], bool]:
    """The record of a sample, then its images and videos by number; and whether the record is JSON.

    Args:
        members: Of one sample, in any order.
        content: What their offsets count in.

    Raises:
        SampleError: There is not exactly one record, or a member is of no known kind.
    """
    jsons = [m for m in members if m.extension == "json"]
    texts = [m for m in members if m.extension in RECORD_EXTENSIONS and m.extension != "json"]
    media = [m for m in members if m.extension in MEDIA_EXTENSIONS]
    for member in members:
        if member.extension not in RECORD_EXTENSIONS + MEDIA_EXTENSIONS:
            allowed = ", ".join(RECORD_EXTENSIONS + MEDIA_EXTENSIONS)
            raise SampleError(f"member {member.name!r} has an extension other than {allowed}")
    if len(jsons) == len(texts) == 1 and _is_metadata(jsons[0], content):
        jsons = []  # as img2dataset writes it: an image, its caption, and where they come from
    records = jsons + texts
    if len(records) != 1:
        raise SampleError(f"{len(records)} records (json or txt) instead of one")
    numbers = [_media_number(member, is_only=len(media) == 1) for member in media]
    if sorted(numbers) != list(range(len(media))):
        raise SampleError(f"images are numbered {numbers} instead of 0, 1, ...")
    in_order = [member for _, member in sorted(zip(numbers, media, strict=True), key=lambda pair: pair[0])]
    return records + in_order, bool(jsons)


def _is_metadata(member: Member, content: Content) -> bool:
    check_record_size(member.length)
    try:
        return not says_its_media(json.loads(content[member.offset : member.offset + member.length]))
    except (ValueError, RecursionError) as error:
        raise SampleError(f"record {member.name!r} cannot be read: {error}") from error


def _media_number(member: Member, *, is_only: bool) -> int:
    middle = split_name(member.name)[1].split(".")[:-1]
    if len(middle) == 1 and middle[0].isascii() and middle[0].isdigit():
        return int(middle[0][:9])
    if not middle or is_only:
        return 0  # KEY.jpg, as plain webdataset directories have it
    raise SampleError(f"member {member.name!r} is not named KEY.NUMBER.EXTENSION")


def _size(member: Member, content: bytes, rules: Rules) -> MediaSize:
    try:
        return check_media(content, decode_limit=rules.decode_limit, decode_all=rules.decode)
    except SampleError as error:
        raise SampleError(f"{member.name!r}: {error}") from error


def _refusal(group: _Group, error: SampleError, path: Path) -> DataError:
    return DataError(
        f"sample {group.key!r}: {error}. {path} at byte {group.offset}. "
        "Write the shard again without it, or leave such samples out with --exclude-bad."
    )


def _line(path: Path, key: str | None, offset: int, reason: str) -> Excluded:
    return {"shard": path.name, "key": key, "offset": offset, "reason": reason}
