# SPDX-License-Identifier: Apache-2.0
"""Multimodal training data: shards, a deterministic plan, packed batches, and a ledger of what was consumed."""

from mindvl_data.config import DataConfig, ImageConfig, PackingConfig, SourceConfig
from mindvl_data.errors import BadSample, DataError
from mindvl_data.images import smart_resize
from mindvl_data.index import index_folder
from mindvl_data.loader import Loader
from mindvl_data.packing import Packer
from mindvl_data.tokenization import Tokenizer, load_tokenizer
from mindvl_data.types import IGNORE_INDEX, Batch, Segment
from mindvl_data.write import write_shards

__all__ = [
    "IGNORE_INDEX",
    "BadSample",
    "Batch",
    "DataConfig",
    "DataError",
    "ImageConfig",
    "Loader",
    "Packer",
    "PackingConfig",
    "Segment",
    "SourceConfig",
    "Tokenizer",
    "index_folder",
    "load_tokenizer",
    "smart_resize",
    "write_shards",
]
