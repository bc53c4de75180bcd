# SPDX-License-Identifier: Apache-2.0
"""Vision encoder, projector and language model on megatron-core, and their conversion to and from transformers.

Everything that needs megatron-core is imported on first use, because that import fixes the device of the process.
"""

from typing import TYPE_CHECKING, Any

from mindvl_model.accelerator import Accelerator, set_up_device
from mindvl_model.config import MindVLConfig, TokenConfig, VisionConfig, config_from_json, for_tokenizer
from mindvl_model.errors import ModelError, WeightError
from mindvl_model.families.registry import PRESETS, LanguagePreset
from mindvl_model.language_config import LanguageConfig
from mindvl_model.sizes import named_config

if TYPE_CHECKING:
    from mindvl_model.model import MindVLModel

__all__ = [
    "PRESETS",
    "Accelerator",
    "LanguageConfig",
    "LanguagePreset",
    "MindVLConfig",
    "MindVLModel",
    "ModelError",
    "TokenConfig",
    "VisionConfig",
    "WeightError",
    "config_from_json",
    "for_tokenizer",
    "named_config",
    "set_up_device",
]


def __getattr__(name: str) -> Any:
    if name == "MindVLModel":
        from mindvl_model.model import MindVLModel

        return MindVLModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
