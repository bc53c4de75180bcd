# SPDX-License-Identifier: Apache-2.0
"""Record -> sample as it is stored in a shard, checked as indexing checks it.

Last step of the last segment, in the workers, so that writing shards only copies bytes.
"""

import json
from typing import Any

from mindvl_data.config import ImageConfig
from mindvl_data.curation.engine.part_files import framed
from mindvl_data.curation.record import Record
from mindvl_data.errors import SampleError
from mindvl_data.samples import parse_sample
from mindvl_data.shards.media import check_media, media_extension
from mindvl_data.types import RawSample

_FORMAT_FIELDS = ("messages", "content", "tools", "min_pixels", "max_pixels")


def sample_frame(record: Record, source: str) -> bytes:
    """The frame (part_files.py) of a finished sample: KEY.json, then the media.

    Raises:
        SampleError: The record is not valid as a sample for training.
    """
    content = json.dumps(sample_body(record, source), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    encoded = content.encode()
    for medium in record.media:
        if media_extension(medium) is None:
            raise SampleError(f"a medium of {len(medium)} bytes is not an image or an mp4 video")
    sizes = tuple(check_media(medium, decode_limit=ImageConfig().decode_limit) for medium in record.media)
    parse_sample(RawSample(key="", record=encoded, is_json=True, media=record.media, sizes=sizes))
    return framed(encoded, record.media)


def sample_body(record: Record, source: str) -> dict[str, Any]:
    """The content of KEY.json: fields of the record format, and all others in `meta`, facts in `meta.curation`."""
    body = record.body
    fields = {name: body[name] for name in _FORMAT_FIELDS if name in body}
    meta = {name: value for name, value in body.items() if name not in (*_FORMAT_FIELDS, "id", "source", "curation")}
    earlier = body.get("curation")
    facts = {**(earlier if isinstance(earlier, dict) else {}), **record.facts}
    return {
        "source": source,
        "id": str(body.get("id") or record.id),
        **fields,
        "meta": {**meta, "origin": record.id, **({"curation": _plain_facts(facts)} if facts else {})},
    }


def _plain_facts(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in facts.items()}
