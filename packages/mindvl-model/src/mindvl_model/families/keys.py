# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json that several families share: written as by transformers 5, read as published.

Used by the file of each family; directory_config.py and config_json.py of hf/ read and write whole directories.
"""

from collections.abc import Iterable
from typing import Any

from mindvl_model.errors import WeightError
from mindvl_model.hf.config_keys import MAX_LAYERS, Keys
from mindvl_model.language_config import GroupedQueryAttention, LanguageConfig, RopeConfig, YarnConfig


def decoder_sizes(text: Keys, root: Keys) -> dict[str, Any]:
    """Read the fields of LanguageConfig that every family has."""
    tied = [section.flag("tie_word_embeddings", False) for section in (text, root)]  # transformers accepts either
    return {
        "hidden_size": text.number("hidden_size"),
        "num_layers": text.number("num_hidden_layers", most=MAX_LAYERS),
        "num_heads": text.number("num_attention_heads"),
        "ffn_hidden_size": text.number("intermediate_size"),
        "vocab_size": text.number("vocab_size"),
        "tie_embeddings": any(tied),
        "norm_epsilon": text.number("rms_norm_eps", 1e-6, whole=False),
        "max_positions": text.number("max_position_embeddings"),
        "init_std": text.number("initializer_range", 0.02, whole=False, least=0),
    }


def write_decoder(language: LanguageConfig) -> dict[str, Any]:
    """Return the keys that every family has."""
    return {
        "vocab_size": language.vocab_size,
        "hidden_size": language.hidden_size,
        "intermediate_size": language.ffn_hidden_size,
        "num_hidden_layers": language.num_layers,
        "num_attention_heads": language.num_heads,
        "max_position_embeddings": language.max_positions,
        "rms_norm_eps": language.norm_epsilon,
        "tie_word_embeddings": language.tie_embeddings,
        "initializer_range": language.init_std or 0.02,
    }


def grouped_query(language: LanguageConfig) -> GroupedQueryAttention:
    """The attention of a family that has grouped-query attention."""
    assert language.attention.kind == "grouped_query"
    return language.attention


def rotary_keys(text: Keys, default: float) -> tuple[float, str, dict[str, Any]]:
    """Base, kind and further parameters of the rotary embedding; older directories have the base at the top level."""
    given: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        section = text.take(name, None) or {}
        if not isinstance(section, dict):
            raise text.unsupported(name, section, "a JSON object")
        given |= section
    outside = text.number("rope_theta", default, whole=False)
    theta = Keys(given, f"{text.where}: rope_parameters").number("rope_theta", outside, whole=False)
    given.pop("rope_theta", None)
    types = [given.pop(name, None) for name in ("type", "rope_type")]
    kinds = {str(kind) for kind in types if kind is not None} or {"default"}
    if len(kinds) > 1:
        kinds -= {"default"}  # Qwen2.5-VL directories saved by transformers have both mrope and default
    return theta, " and ".join(sorted(kinds)), given


def check_no_scaling(text: Keys, kind: str, more: Iterable[str]) -> None:
    """Check that the rotary embedding has the default kind and no further parameters.

    Raises:
        WeightError: It has another kind, or parameters that are not supported.
    """
    if kind != "default" or set(more):
        raise WeightError(
            f"{text.where}: rotary embedding of type {kind!r:.40} with {sorted(more)!s:.100} is not supported. "
            "Use a model without it."
        )


def yarn_keys(text: Keys, given: dict[str, Any], max_positions: int) -> YarnConfig:
    """Remove the YaRN keys from `given` and read them; missing keys have the defaults of transformers."""
    rope = Keys(dict(given), f"{text.where}: rope_scaling")
    rope.only("truncate", True, None)
    rope.only("attention_factor", None)
    original = rope.number("original_max_position_embeddings")
    factor = rope.take("factor", None)
    yarn = YarnConfig(
        factor=max_positions / original if factor is None else rope.number("factor", whole=False),
        original_max_positions=original,
        beta_fast=_number_or_zero(rope, "beta_fast") or 32.0,
        beta_slow=_number_or_zero(rope, "beta_slow") or 1.0,
        mscale=_number_or_zero(rope, "mscale"),
        mscale_all_dim=_number_or_zero(rope, "mscale_all_dim"),
    )
    rope.check_remaining()
    given.clear()
    return yarn


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """Return the value of rope_parameters."""
    if rope.scaling is None:
        return {"rope_type": "default", "rope_theta": rope.rotary_base}
    return {
        "rope_type": "yarn",
        "rope_theta": rope.rotary_base,
        "factor": rope.scaling.factor,
        "original_max_position_embeddings": rope.scaling.original_max_positions,
        "beta_fast": rope.scaling.beta_fast,
        "beta_slow": rope.scaling.beta_slow,
        "mscale": rope.scaling.mscale,
        "mscale_all_dim": rope.scaling.mscale_all_dim,
    }


def _number_or_zero(rope: Keys, name: str) -> float:
    """The value of a number that may be null or missing, which means 0."""
    return 0.0 if rope.take(name, None) is None else float(rope.number(name, whole=False, least=0))
