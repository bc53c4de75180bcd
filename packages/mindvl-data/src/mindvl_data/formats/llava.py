# SPDX-License-Identifier: Apache-2.0
"""LLaVA and ShareGPT: a JSON list or JSON lines of conversations with `<image>` and `<video>` placeholders.

A record: `{"id", "image": NAME | [NAME, ...], "conversations": [{"from": "human", "value": "<image>\\nRead it."},
...]}`, and the same with `video`. Optional `boxes` ([x1, y1, x2, y2]) and `points` ([x, y]) are in pixels of the
original image; the text refers to them as `<box:0>` and `<point:0>`. For an image other than the first, an entry is
`{"image": 1, "xyxy": [...]}` (or `xy`). conversation.py lists the other kinds of records that are read.
"""

from functools import partial
from pathlib import Path

from mindvl_data.formats.conversation import conversation_record
from mindvl_data.formats.record import Records, each_row, read_json


def read_llava(path: Path, image_root: Path | None) -> Records:
    """Read a LLaVA or ShareGPT file; file names are relative to `image_root` or else to the directory of the file."""
    total, rows = read_json(path)
    return Records(
        total=total,
        records=each_row(rows, partial(conversation_record, path.parent if image_root is None else image_root)),
    )
