# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json that several families share: written as by transformers 5, read as published.

Used by the file of each family; directory_config.py and config_json.py of hf/ read and write whole directories.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from mindvl_model.errors import WeightError
from mindvl_model.hf.config_keys import MAX_LAYERS, Keys
from mindvl_model.language_config import (
    ExpertsConfig,
    GroupedQueryAttention,
    LanguageConfig,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeScaling,
    YarnConfig,
)


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
        "init_std": 0.02
        if text.take("initializer_range", None) is None
        else text.number("initializer_range", whole=False, least=0),
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


def read_grouped_query(
    family: str,
    text: Keys,
    root: Keys,
    *,
    rotary_base: float = 10_000.0,
    head_dim: int | None = None,
    num_kv_heads: int | None = None,
    experts: ExpertsConfig | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    mlp_bias: bool = False,
) -> LanguageConfig:
    """Read a decoder with grouped-query attention and positions along one axis.

    Args:
        family: The model_type.
        text: The section of the decoder.
        root: The top-level section.
        rotary_base: Base of the rotary embedding if no key has it.
        head_dim: Size of a head if the key is missing; None, like null: hidden_size / num_attention_heads.
        num_kv_heads: Number of key-value heads if the key is missing; None, like null: one for each query head.
        experts: Experts of the decoder.
        qkv_bias: Biases of the query, key and value projections.
        output_bias: Bias of the output projection.
        qk_norm: Norms of queries and keys.
        mlp_bias: Biases of the MLP.
    """
    sizes = decoder_sizes(text, root)
    return LanguageConfig(
        family=family,
        **sizes,
        attention=GroupedQueryAttention(
            num_kv_heads=number_or(text, "num_key_value_heads", sizes["num_heads"], missing=num_kv_heads),
            head_dim=number_or(text, "head_dim", sizes["hidden_size"] // sizes["num_heads"], missing=head_dim),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=qk_norm,
        ),
        rope=read_rope(text, rotary_base, sizes["max_positions"]),
        experts=experts,
        mlp_bias=mlp_bias,
    )


def write_grouped_query(language: LanguageConfig) -> dict[str, Any]:
    """Return the keys of a decoder with grouped-query attention and positions along one axis."""
    attention = grouped_query(language)
    return write_decoder(language) | {
        "model_type": language.family,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rope_parameters": write_rope(language.rope),
    }


def number_or(text: Keys, name: str, default: int, *, missing: int | None = None) -> int:
    """Read a number; null means the default, and so does a missing key unless `missing` has a value for it."""
    return default if text.take(name, missing) is None else int(text.number(name, missing))


def check_optional_windows(text: Keys) -> None:
    """Check the sliding windows of a family with use_sliding_window, of which the last layers may have one.

    Raises:
        WeightError: Windows hide positions of sequences of the maximum length.
    """
    layers = text.number("num_hidden_layers", most=MAX_LAYERS)
    window, first = text.take("sliding_window", 4096), text.take("max_window_layers", 28)
    if text.flag("use_sliding_window", False) and not (isinstance(first, int) and first >= layers):
        text.check_window(window)


def read_rope(text: Keys, default: float, max_positions: int) -> RopeConfig:
    """Read a rotary embedding over one axis.

    Args:
        text: The section of the decoder.
        default: Base if no key has it.
        max_positions: Original length of scalings that do not have it.
    """
    base, kind, more = rotary_keys(text, default)
    if "mrope_section" in more:
        raise WeightError(
            f"{text.where}: mrope_section={more['mrope_section']!r:.60} is not supported, because this model_type has "
            "positions along one axis. Use another directory."
        )
    rope = Keys(more, f"{text.where}: {'rope_scaling' if text.values.get('rope_scaling') else 'rope_parameters'}")
    scaling: RopeScaling | None = None
    if kind == "linear":
        scaling = LinearScaling(factor=rope.number("factor", whole=False))
    elif kind == "llama3":
        scaling = Llama3Scaling(
            factor=rope.number("factor", whole=False),
            low_freq_factor=rope.number("low_freq_factor", whole=False),
            high_freq_factor=rope.number("high_freq_factor", whole=False),
            original_max_positions=number_or(rope, "original_max_position_embeddings", max_positions),
        )
    elif kind == "yarn":
        scaling = _read_yarn(rope, max_positions)
    elif kind != "default":
        check_no_scaling(text, kind, more)
    for section in (rope, text):
        section.only("partial_rotary_factor", 1, None)
    rope.check_remaining()
    return RopeConfig(rotary_base=base, scaling=scaling)


def rotary_keys(text: Keys, default: float) -> tuple[float, str, dict[str, Any]]:
    """Base, kind and further parameters of the rotary embedding; older directories have the base at the top level."""
    sections = {name: text.take(name, None) or {} for name in ("rope_parameters", "rope_scaling")}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise text.unsupported(name, section, "a JSON object")
    given: dict[str, Any] = dict(sections["rope_scaling"] or sections["rope_parameters"])
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


def _read_yarn(rope: Keys, max_positions: int) -> YarnConfig:
    """Read YaRN scaling; missing keys have the defaults of transformers."""
    original = number_or(rope, "original_max_position_embeddings", max_positions)
    factor, attention_factor = (rope.take(name, None) for name in ("factor", "attention_factor"))
    return YarnConfig(
        factor=max_positions / original if factor is None else rope.number("factor", whole=False),
        original_max_positions=original,
        beta_fast=_number_or_zero(rope, "beta_fast") or 32.0,
        beta_slow=_number_or_zero(rope, "beta_slow") or 1.0,
        mscale=_number_or_zero(rope, "mscale"),
        mscale_all_dim=_number_or_zero(rope, "mscale_all_dim"),
        attention_factor=None if attention_factor is None else rope.number("attention_factor", whole=False),
        truncate=rope.flag("truncate", True),
    )


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """Return the value of rope_parameters."""
    scaling = rope.scaling
    written: dict[str, Any] = {"rope_type": "default" if scaling is None else scaling.kind}
    written["rope_theta"] = rope.rotary_base
    if scaling is None:
        return written
    values = {name: value for name, value in asdict(scaling).items() if name != "kind"}
    if "original_max_positions" in values:
        values["original_max_position_embeddings"] = values.pop("original_max_positions")
    defaults = {"attention_factor": None, "truncate": True}
    return written | {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}


def _number_or_zero(rope: Keys, name: str) -> float:
    """The value of a number that may be null or missing, which means 0."""
    return 0.0 if rope.take(name, None) is None else float(rope.number(name, whole=False, least=0))
