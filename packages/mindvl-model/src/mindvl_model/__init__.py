# SPDX-License-Identifier: Apache-2.0
"""Vision encoder, projector and language model on megatron-core, and their way to and from transformers directories.

What needs megatron-core is imported when first asked for, because that settles the accelerator of the process.
"""

from typing import TYPE_CHECKING, Any

from mindvl_model.accelerator import Accelerator, enter
from mindvl_model.config import MindVLConfig, TokenConfig, VisionConfig, config_from_json, for_tokenizer
from mindvl_model.errors import ModelError, WeightError
from mindvl_model.language_config import (
    DeepSeekV3LanguageConfig,
    LanguageConfig,
    Qwen2LanguageConfig,
    Qwen3LanguageConfig,
    Qwen3MoELanguageConfig,
)
from mindvl_model.sizes import named_config

if TYPE_CHECKING:
    from mindvl_model.model import MindVLModel

__all__ = [
    "Accelerator",
    "DeepSeekV3LanguageConfig",
    "LanguageConfig",
    "MindVLConfig",
    "MindVLModel",
    "ModelError",
    "Qwen2LanguageConfig",
    "Qwen3LanguageConfig",
    "Qwen3MoELanguageConfig",
    "TokenConfig",
    "VisionConfig",
    "WeightError",
    "config_from_json",
    "enter",
    "for_tokenizer",
    "named_config",
]


def __getattr__(name: str) -> Any:
    if name == "MindVLModel":
        from mindvl_model.model import MindVLModel

        return MindVLModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
