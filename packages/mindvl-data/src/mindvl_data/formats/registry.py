# SPDX-License-Identifier: Apache-2.0
"""The table of the input formats of `mindvl data write`.

A format is a function from a path to records. To add one, write a module with the function and add it to FORMATS.
"""

from collections.abc import Callable
from pathlib import Path

from mindvl_data.formats.classes import read_classes
from mindvl_data.formats.conversation import read_conversations
from mindvl_data.formats.datasets import read_datasets
from mindvl_data.formats.imagefolder import read_imagefolder
from mindvl_data.formats.parquet import read_parquet
from mindvl_data.formats.record import Records
from mindvl_data.formats.table import read_table
from mindvl_data.formats.text import read_text
from mindvl_data.formats.tsv import read_tsv
from mindvl_data.formats.webdataset import read_webdataset

Reader = Callable[[Path, Path | None], Records]  # (source, image_root) -> records
WEBDATASET = "webdataset"  # the one format whose source may be an address or a pipeline, see its file

FORMATS: dict[str, Reader] = {
    "classes": read_classes,
    "datasets": read_datasets,
    "imagefolder": read_imagefolder,
    "llava": read_conversations,
    "messages": read_conversations,
    "parquet": read_parquet,
    "table": read_table,
    "text": read_text,
    "tsv": read_tsv,
    WEBDATASET: lambda source, image_root: read_webdataset(source),
}
