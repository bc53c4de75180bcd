# SPDX-License-Identifier: Apache-2.0
"""Read a MindVLConfig from a transformers directory: MindVL, a whole model of transformers, a language model.

Runs before a model is built for the weights of a directory. Every key of config.json must be known (config_keys.py):
used here, without effect on the computation, or with the only supported value.
"""

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from mindvl_model.config import MindVLConfig, TokenConfig
from mindvl_model.errors import ModelError, WeightError
from mindvl_model.families.registry import TEXT_MODELS, read_language
from mindvl_model.hf.config_json import TOKENS_PER_SECOND
from mindvl_model.hf.config_keys import Keys, read_keys, unsupported_model
from mindvl_model.hf.vision_json import read_vision, vision_kind
from mindvl_model.hf.whole_models import WHOLE_MODELS
from mindvl_model.language_config import LanguageConfig
from mindvl_model.weights.directory import stored_names
from mindvl_model.weights.json_file import read_json
from mindvl_model.weights.names import canonical_name, mtp_layers

logger = logging.getLogger(__name__)

SUPPORTED = ("mindvl", *WHOLE_MODELS)  # model_type of directories with a whole model


def config_from_directory(path: Path) -> MindVLConfig:
    """Return the configuration of a whole model, from a MindVL directory or one of transformers.

    Raises:
        WeightError: The directory holds another model, or config.json has an unknown key or value.
    """
    keys = read_keys(path)
    kind = keys.take("model_type", None)
    if kind not in SUPPORTED:
        to_do = (
            f"Combine this language model with a vision encoder: mindvl convert --vision DIRECTORY --language {path} "
            "CHECKPOINT, or name it in init.language of a recipe."
            if kind in TEXT_MODELS
            else "Use one of these."
        )
        raise WeightError(
            f"{keys.where}: model_type={kind!r:.60} is not supported as a whole model, only "
            f"{', '.join(SUPPORTED)} are. {to_do}"
        )
    whole = WHOLE_MODELS.get(kind)
    nested = whole is None or whole.nested or keys.take("text_config", None) is not None
    text = keys.section("text_config") if nested else keys  # published Qwen2.5-VL has the decoder keys at the top level
    vision = keys.section("vision_config")
    family = _family(text) if whole is None else whole.family
    if whole is None:
        encoder = vision_kind(vision)
    else:
        encoder = whole.vision
        vision.only("model_type", *whole.vision_model_types, None)
        text.only("model_type", family, *((kind, f"{kind}_text") if not whole.nested else ()), None)
    try:
        vision_encoder, language = read_vision(vision, path, encoder), read_language(family, text, keys)
        if nested and keys.values.get("hidden_size") is not None:
            _check_copy(keys, family, language)
        language = _without_absent_mtp(language, path)
        config = MindVLConfig(vision=vision_encoder, language=language, tokens=_tokens(keys, text, path))
    except ModelError as error:
        raise _located(error, keys) from error
    if vision.take("out_hidden_size", language.hidden_size) != language.hidden_size:
        raise WeightError(
            f"{vision.where}: out_hidden_size={vision.values['out_hidden_size']!r:.60} is not supported; it must be "
            f"the hidden_size of the language model, {language.hidden_size}. Use another directory."
        )
    if kind == "mindvl":
        vision.take("tokens_per_second", None)  # used by M-RoPE only
    elif not config.vision.entry.video.timestamps:
        vision.values = {
            "tokens_per_second": 4
        } | vision.values  # default of transformers; published directories have 2
        vision.only("tokens_per_second", TOKENS_PER_SECOND)
    for section in (text, vision, keys):
        section.check_remaining()
    return config


def language_config_from_directory(path: Path) -> LanguageConfig:
    """Return the configuration of the language model in a directory of a language model or of a whole model.

    Raises:
        WeightError: The directory holds another model, or config.json has an unknown key or value.
    """
    keys = read_keys(path)
    kind = keys.take("model_type", None)
    if kind in SUPPORTED:
        return config_from_directory(path).language
    if kind not in TEXT_MODELS:
        raise WeightError(
            f"{keys.where}: model_type={kind!r:.60} is not supported, only {', '.join((*TEXT_MODELS, *SUPPORTED))} "
            "are. Use a directory of one of them."
        )
    language = read_language(kind, keys, keys)
    keys.check_remaining()
    return _without_absent_mtp(language, path)


def _check_copy(keys: Keys, family: str, language: LanguageConfig) -> None:
    """Check the keys of the decoder that transformers 4.52 to 4.56 also wrote at the top level of Qwen2.5-VL directories."""
    if read_language(family, keys, keys) != language:
        raise WeightError(
            f"{keys.where}: the keys of the decoder at the top level differ from those in text_config, so the model is "
            "ambiguous. Use another directory."
        )


def _family(text: Keys) -> str:
    """The model_type in text_config of a MindVL directory."""
    family = text.take("model_type", None)
    if family not in TEXT_MODELS:
        raise WeightError(
            f"{text.where}: model_type={family!r:.60} is not supported, only {', '.join(TEXT_MODELS)} are. "
            "Use another directory."
        )
    return str(family)


def _tokens(keys: Keys, text: Keys, path: Path) -> TokenConfig:
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    generation = generation if isinstance(generation, dict) else {}

    def first(name: str) -> Any:
        found = [values[name] for values in (keys.values, text.values, generation) if values.get(name) is not None]
        return found[0] if found else None

    end, pad = first("eos_token_id"), first("pad_token_id")
    if pad is None:
        pad = first("bos_token_id")  # in the tokenizers of Qwen, <|endoftext|> is both
    if end is None or pad is None:
        name = "eos_token_id" if end is None else "pad_token_id"
        raise WeightError(f"{keys.where}: {name} is missing. Add the id from the tokenizer of the directory.")
    ends = Keys({"eos_token_id": end[0] if isinstance(end, list) and end else end, "pad_token_id": pad}, keys.where)
    has_video = keys.take("video_token_id", None) is not None
    return TokenConfig(
        image=keys.number("image_token_id", least=0),
        vision_start=keys.number("vision_start_token_id", least=0),
        vision_end=keys.number("vision_end_token_id", least=0),
        end_of_turn=ends.number("eos_token_id", least=0),
        pad=ends.number("pad_token_id", least=0),
        video=keys.number("video_token_id", least=0) if has_video else None,
    )


def _located(error: ModelError, keys: Keys) -> WeightError:
    return error if isinstance(error, WeightError) else unsupported_model(error, keys.where)


def _without_absent_mtp(language: LanguageConfig, path: Path) -> LanguageConfig:
    """Set num_mtp_layers to 0 if the weights have none: transformers saves the number but not the layers."""
    if not language.num_mtp_layers:
        return language
    names = stored_names(path)
    if names is None or mtp_layers(map(canonical_name, names), language):
        return language
    _warn_of_absent_mtp(path)
    return replace(language, num_mtp_layers=0)


@cache  # once per process, even if the configuration is read several times
def _warn_of_absent_mtp(path: Path) -> None:
    logger.warning(
        "%s: num_nextn_predict_layers is set, but the weights contain no multi-token prediction layers (transformers "
        "does not save them). The model is loaded without them.",
        path / "config.json",
    )
