# SPDX-License-Identifier: Apache-2.0
"""Multimodal training data: shards, a deterministic plan, packed batches, and a ledger of what was consumed."""

from mindvl_data.config import DataConfig, ImageConfig, PackingConfig, SourceConfig, StoreConfig, VideoConfig
from mindvl_data.errors import BadSample, DataError, redact
from mindvl_data.images import smart_resize
from mindvl_data.loader import Loader
from mindvl_data.packed_dataset import PackedDataset
from mindvl_data.plan.packing import Packer
from mindvl_data.plan.planner import Planner, rows_of_rank
from mindvl_data.plan.sources import SourceIndex
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.indexing import index_folder
from mindvl_data.shards.write import write_shards
from mindvl_data.tokenization import Tokenizer, load_tokenizer
from mindvl_data.types import IGNORE_INDEX, Batch, Segment

__all__ = [
    "IGNORE_INDEX",
    "BadSample",
    "Batch",
    "DataConfig",
    "DataError",
    "ImageConfig",
    "Loader",
    "PackedDataset",
    "Packer",
    "PackingConfig",
    "Planner",
    "Segment",
    "ShardFiles",
    "SourceConfig",
    "SourceIndex",
    "StoreConfig",
    "Tokenizer",
    "VideoConfig",
    "index_folder",
    "load_tokenizer",
    "redact",
    "rows_of_rank",
    "smart_resize",
    "write_shards",
]
