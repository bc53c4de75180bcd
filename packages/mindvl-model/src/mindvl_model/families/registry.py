# SPDX-License-Identifier: Apache-2.0
"""All families of decoders by model_type: presets for recipes, and readers and writers of config.json.

Used by the configuration of recipes and by the modules of hf/ that read and write whole directories.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindvl_model.errors import ModelError, WeightError
from mindvl_model.families import deepseek_v3, qwen2, qwen3, qwen3_moe
from mindvl_model.hf.config_keys import Keys, unsupported_model
from mindvl_model.language_config import LanguageConfig

LanguagePreset = (
    qwen2.Qwen2Preset | qwen3.Qwen3Preset | qwen3_moe.Qwen3MoEPreset | deepseek_v3.DeepSeekV3Preset | LanguageConfig
)


@dataclass(frozen=True)
class Family:
    """A family: its preset, and reader and writer of its keys in config.json."""

    preset: type[LanguagePreset]
    read: Callable[[str, Keys, Keys], LanguageConfig]  # from model_type, the section of the decoder and the top level
    write: Callable[[LanguageConfig], dict[str, Any]]
    is_text_model: bool = True  # whether directories of the family hold a language model only


FAMILIES: dict[str, Family] = {
    "qwen2": Family(qwen2.Qwen2Preset, qwen2.read, qwen2.write, is_text_model=False),
    "qwen3": Family(qwen3.Qwen3Preset, qwen3.read, qwen3.write),
    "qwen3_moe": Family(qwen3_moe.Qwen3MoEPreset, qwen3_moe.read, qwen3_moe.write),
    "deepseek_v3": Family(deepseek_v3.DeepSeekV3Preset, deepseek_v3.read, deepseek_v3.write),
}
TEXT_MODELS = tuple(name for name, family in FAMILIES.items() if family.is_text_model)
PRESETS: dict[str, type[LanguagePreset]] = {
    "decoder": LanguageConfig,
    **{name: family.preset for name, family in FAMILIES.items()},
}


def read_language(family: str, text: Keys, root: Keys) -> LanguageConfig:
    """Read the configuration of a language model from a section of config.json.

    Args:
        family: A key of FAMILIES, usually the model_type of the section.
        text: The section of the decoder.
        root: The top-level section.

    Raises:
        WeightError: A key is missing, or its value is invalid or not supported.
    """
    try:
        return FAMILIES[family].read(family, text, root)
    except WeightError:
        raise
    except ModelError as error:
        raise unsupported_model(error, text.where) from error


def write_language(language: LanguageConfig) -> dict[str, Any]:
    """Return the keys of a language model, without the token ids.

    Raises:
        ModelError: The transformers configuration cannot represent the model.
    """
    return FAMILIES[language.family].write(language)
