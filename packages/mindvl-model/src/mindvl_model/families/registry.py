# SPDX-License-Identifier: Apache-2.0
"""All families of decoders by model_type: presets for recipes, and readers and writers of config.json.

Used by the configuration of recipes and by the modules of hf/ that read and write whole directories.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from mindvl_model.errors import ModelError, WeightError
from mindvl_model.families import deepseek_v3, dots1, llama, mistral, qwen2, qwen3, qwen3_moe, qwen3_vl
from mindvl_model.hf.config_keys import Keys, unsupported_model
from mindvl_model.language_config import LanguageConfig

LanguagePreset = (
    qwen2.Qwen2Preset
    | qwen3.Qwen3Preset
    | qwen3_moe.Qwen3MoEPreset
    | qwen3_vl.Qwen3VLPreset
    | qwen3_vl.Qwen3VLMoEPreset
    | deepseek_v3.DeepSeekV3Preset
    | llama.LlamaPreset
    | mistral.MistralPreset
    | dots1.Dots1Preset
    | LanguageConfig
)


@dataclass(frozen=True)
class Family:
    """A family: its preset, and reader and writer of its keys in config.json."""

    preset: type[LanguagePreset]
    read: Callable[[str, Keys, Keys], LanguageConfig]  # from model_type, the section of the decoder and the top level
    write: Callable[[LanguageConfig], dict[str, Any]]
    is_text_model: bool = True  # whether a directory can hold a language model of the family only


FAMILIES: dict[str, Family] = {
    "qwen2": Family(qwen2.Qwen2Preset, qwen2.read, qwen2.write),
    "qwen3": Family(qwen3.Qwen3Preset, qwen3.read, qwen3.write),
    "qwen3_moe": Family(qwen3_moe.Qwen3MoEPreset, qwen3_moe.read, qwen3_moe.write),
    "qwen3_vl_text": Family(qwen3_vl.Qwen3VLPreset, qwen3_vl.read, qwen3_vl.write, is_text_model=False),
    "qwen3_vl_moe_text": Family(qwen3_vl.Qwen3VLMoEPreset, qwen3_vl.read_moe, qwen3_vl.write, is_text_model=False),
    "deepseek_v3": Family(deepseek_v3.DeepSeekV3Preset, deepseek_v3.read, deepseek_v3.write),
    "llama": Family(llama.LlamaPreset, llama.read, llama.write),
    "mistral": Family(mistral.MistralPreset, mistral.read, mistral.write),
    "dots1": Family(dots1.Dots1Preset, dots1.read, dots1.write),
}
# Values of model_type of directories with a language model only.
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
        ModelError: The transformers configuration of the family cannot represent the model.
    """
    if language.family not in FAMILIES:
        raise ModelError(
            f"language.family: {language.family!r:.60} is unknown, so the model cannot be exported. Use one of "
            f"{', '.join(FAMILIES)}."
        )
    document = FAMILIES[language.family].write(language)
    stored = read_language(language.family, Keys(document, "config.json"), Keys(document, "config.json"))
    for name, value, read in _differences(_function(language), _function(stored)):
        raise ModelError(
            f"language.{name}: {value!r:.60} cannot be stored in the config.json of the family {language.family}, which "
            f"stands for {read!r:.60}. Use another family, or train with this value."
        )
    return document


def _function(language: LanguageConfig) -> LanguageConfig:
    """The decoder without what affects its training only, which config.json does not have."""
    experts = language.experts
    if experts is not None:
        experts = replace(experts, aux_loss_weight=0.0, bias_update_rate=0.0)
    return replace(language, experts=experts, init_std=None, mtp_loss_weight=0.0)


def _differences(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(field path, value, other value) of the fields in which two configurations differ."""
    if is_dataclass(one) and type(one) is type(other):
        for field in fields(one):
            name = f"{path}.{field.name}" if path else field.name
            yield from _differences(getattr(one, field.name), getattr(other, field.name), name)
    elif one != other:
        yield path, one, other
