# SPDX-License-Identifier: Apache-2.0
"""Input formats of `data write`: one file each, entered in one table.

A format is a function from a path to records; to add one, write the function and enter it in FORMATS.
"""

from collections.abc import Callable
from pathlib import Path

from mindvl_data.formats.imagefolder import read_imagefolder
from mindvl_data.formats.llava import read_llava
from mindvl_data.formats.messages import read_messages
from mindvl_data.formats.parquet import read_parquet
from mindvl_data.formats.record import RecordError, Records, SourceRecord
from mindvl_data.formats.text import read_text
from mindvl_data.formats.tsv import read_tsv
from mindvl_data.formats.webdataset import Pipeline, read_webdataset, webdataset_identity

Reader = Callable[[Path, Path | None], Records]  # (source, image_root) -> records
WEBDATASET = "webdataset"  # the one format whose source may be an address or a pipeline, see its file

FORMATS: dict[str, Reader] = {
    "imagefolder": read_imagefolder,
    "llava": read_llava,
    "messages": read_messages,
    "parquet": read_parquet,
    "text": read_text,
    "tsv": read_tsv,
    WEBDATASET: lambda source, image_root: read_webdataset(source),
}

__all__ = [
    "FORMATS",
    "WEBDATASET",
    "Pipeline",
    "Reader",
    "RecordError",
    "Records",
    "SourceRecord",
    "read_webdataset",
    "webdataset_identity",
]
