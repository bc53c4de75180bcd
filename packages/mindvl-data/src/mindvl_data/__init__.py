# SPDX-License-Identifier: Apache-2.0
"""Multimodal training data: shards, a deterministic data order, packed batches, and a ledger of the consumed samples.

The public names are imported on first use (PEP 562), so that `import mindvl_data` loads neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from mindvl_data.types import IGNORE_INDEX, Batch, SampleReference

_MODULES = {
    "config": ("DataConfig", "ImageConfig", "PackingConfig", "SourceConfig", "StoreConfig", "VideoConfig"),
    "errors": ("DataError", "SampleError", "redact"),
    "images": ("smart_resize",),
    "loader": ("Loader",),
    "order.data_order": ("DataOrder", "packs_of_rank"),
    "order.packing": ("Packer",),
    "order.sources": ("SourceIndex",),
    "packed_dataset": ("PackedDataset",),
    "shards.files": ("ShardFiles",),
    "shards.indexing": ("index_directory",),
    "shards.write": ("write_shards",),
    "tokenization": ("Tokenizer", "load_tokenizer"),
    "types": ("IGNORE_INDEX", "Batch", "SampleReference"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

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
    "SampleReference",
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

if not TYPE_CHECKING:  # a type checker would accept every name otherwise

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
