# SPDX-License-Identifier: Apache-2.0
"""Multimodal training data: shards, a deterministic plan, packed batches, and a ledger of what was consumed."""

from mindvl_data.config import DataConfig, ImageConfig, PackingConfig, SourceConfig, StoreConfig, VideoConfig
from mindvl_data.errors import DataError, SampleError, redact
from mindvl_data.images import smart_resize
from mindvl_data.loader import Loader
from mindvl_data.order.data_order import DataOrder, packs_of_rank
from mindvl_data.order.packing import Packer
from mindvl_data.order.sources import SourceIndex
from mindvl_data.packed_dataset import PackedDataset
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.indexing import index_directory
from mindvl_data.shards.write import write_shards
from mindvl_data.tokenization import Tokenizer, load_tokenizer
from mindvl_data.types import IGNORE_INDEX, Batch, Segment

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "DataConfig",
    "DataError",
    "DataOrder",
    "ImageConfig",
    "Loader",
    "PackedDataset",
    "Packer",
    "PackingConfig",
    "SampleError",
    "Segment",
    "ShardFiles",
    "SourceConfig",
    "SourceIndex",
    "StoreConfig",
    "Tokenizer",
    "VideoConfig",
    "index_directory",
    "load_tokenizer",
    "packs_of_rank",
    "redact",
    "smart_resize",
    "write_shards",
]
