# SPDX-License-Identifier: Apache-2.0
"""Qwen2 decoders: biases of queries, keys and values; with rotary embedding over three axes (M-RoPE) in Qwen2.5-VL."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from mindvl_model.errors import ModelError, WeightError
from mindvl_model.families.keys import (
    check_no_scaling,
    check_optional_windows,
    decoder_sizes,
    grouped_query,
    number_or,
    read_grouped_query,
    rotary_keys,
    write_decoder,
    write_grouped_query,
)
from mindvl_model.families.preset import GroupedQueryPreset
from mindvl_model.hf.config_keys import Keys
from mindvl_model.language_config import GroupedQueryAttention, LanguageConfig, RopeConfig

# Between these versions, Qwen2.5-VL of transformers changed the position of the text after a video.
LAST_WITH_ALL_AXES, FIRST_WITH_HEIGHT_WIDTH = "5.2.0", "5.3.0"


@dataclass(frozen=True, kw_only=True)
class Qwen2Preset(GroupedQueryPreset):
    """The dense Qwen2 decoder of Qwen2.5-VL: biased query, key and value projections, rotary over three axes (M-RoPE)."""

    kind: Literal["qwen2"] = "qwen2"  # Family of the language model; selects the fields of this section.
    mrope_sections: tuple[int, int, int] = (16, 24, 24)  # Rotary frequency pairs per axis: time, height, width.
    # First position after a video. height_width: its start plus the larger of grid height and width (transformers 5.3
    # and later); all_axes: one past the largest position, time included (earlier versions).
    after_video: Literal["height_width", "all_axes"] = "height_width"
    max_positions: int = 128_000

    def decoder(self) -> LanguageConfig:
        """Return the properties of the decoder."""
        return self.with_properties(
            attention=self.part(GroupedQueryAttention, qkv_bias=True),
            rope=self.part(RopeConfig),
        )


def read(family: str, text: Keys, root: Keys) -> LanguageConfig:
    """Read a Qwen2 decoder: with M-RoPE that of Qwen2.5-VL, otherwise that of a language model."""
    check_optional_windows(text)
    if root.values.get("model_type") != "qwen2_5_vl" and not _has_sections(text):
        return read_grouped_query(family, text, root, qkv_bias=True, num_kv_heads=32)
    sizes = decoder_sizes(text, root)
    theta, kind, more = rotary_keys(text, 1_000_000.0)
    check_no_scaling(text, "default" if kind == "mrope" else kind, more.keys() - {"mrope_section"})
    time, height, width = Keys(more, f"{text.where}: rope_scaling").numbers("mrope_section", None, count=3)
    return LanguageConfig(
        family=family,
        **sizes,
        attention=GroupedQueryAttention(
            num_kv_heads=number_or(text, "num_key_value_heads", sizes["num_heads"], missing=8),
            head_dim=sizes["hidden_size"] // sizes["num_heads"],
            qkv_bias=True,
        ),
        rope=RopeConfig(rotary_base=theta, mrope_sections=(time, height, width), after_video=_after_video(root)),
    )


def write(language: LanguageConfig) -> dict[str, Any]:
    """Return the keys of a Qwen2 decoder."""
    attention, rope = grouped_query(language), language.rope
    if rope.mrope_sections is None:
        return write_grouped_query(language)
    if attention.head_dim * language.num_heads != language.hidden_size:
        raise ModelError(
            f"language.head_dim: a Qwen2.5-VL model can only be exported if head_dim={attention.head_dim} times num_heads="
            f"{language.num_heads} equals hidden_size={language.hidden_size}. Train with such sizes."
        )
    return write_decoder(language) | {
        "num_key_value_heads": attention.num_kv_heads,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_window_layers": language.num_layers,
        "rope_theta": rope.rotary_base,
        "rope_scaling": {"type": "mrope", "mrope_section": list(rope.mrope_sections)},
        "use_sliding_window": False,
        # config.json has no other key for the position of the text after a video; see `_after_video`
        "transformers_version": LAST_WITH_ALL_AXES if rope.after_video == "all_axes" else FIRST_WITH_HEIGHT_WIDTH,
    }


def _has_sections(text: Keys) -> bool:
    sections = [text.values.get(name) for name in ("rope_scaling", "rope_parameters")]
    return any(
        isinstance(one, dict) and ("mrope_section" in one or "mrope" in (one.get("type"), one.get("rope_type")))
        for one in sections
    )


def _after_video(root: Keys) -> Literal["height_width", "all_axes"]:
    """The rule of the transformers version that saved the directory; Qwen2.5-VL has no key for it."""
    version = str(root.values.get("transformers_version") or FIRST_WITH_HEIGHT_WIDTH)
    found = re.match(r"(\d{1,9})(?:\.(\d{1,9}))?", version)
    if found is None:
        raise WeightError(
            f"{root.where}: transformers_version={version[:40]!r} is not a version, but the positions after a video "
            "depend on it. Set the version of transformers that saved the directory, such as 4.57.0 or 5.3.0."
        )
    first = tuple(map(int, FIRST_WITH_HEIGHT_WIDTH.split(".")[:2]))
    return "height_width" if (int(found[1]), int(found[2] or 0)) >= first else "all_axes"
