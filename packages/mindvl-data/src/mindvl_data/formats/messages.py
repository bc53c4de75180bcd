# SPDX-License-Identifier: Apache-2.0
"""OpenAI-style messages as JSON lines or a JSON list: `{"messages": [{"role", "content"}], "images": [NAME, ...]}`.

Content is a string or a list of parts (`text`, `image`, `video`, `box`, `point`, see samples.py). A part may name its
file (`{"type": "image", "image": NAME}`, `{"type": "image_url", "image_url": {"url": NAME}}`, `{"type": "video",
"video": NAME}`) instead of the lists of the record; a name may be a data URL. conversation.py lists the other kinds of
records that are read.
"""

from functools import partial
from pathlib import Path

from mindvl_data.formats.conversation import conversation_record
from mindvl_data.formats.record import Records, each_row, read_json


def read_messages(path: Path, image_root: Path | None) -> Records:
    """Read a file of messages; file names are relative to `image_root` or else to the directory of the file."""
    total, rows = read_json(path)
    return Records(
        total=total,
        records=each_row(rows, partial(conversation_record, path.parent if image_root is None else image_root)),
    )
