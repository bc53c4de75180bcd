# SPDX-License-Identifier: Apache-2.0
"""Dense Qwen3 decoders: normalized queries and keys, rotary embedding over one axis."""

from dataclasses import dataclass
from typing import Any, Literal

from mindvl_model.families.keys import (
    check_optional_windows,
    grouped_query,
    read_grouped_query,
    write_grouped_query,
)
from mindvl_model.families.preset import GroupedQueryPreset
from mindvl_model.hf.config_keys import Keys
from mindvl_model.language_config import GroupedQueryAttention, LanguageConfig, RopeConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3Preset(GroupedQueryPreset):
    """A dense Qwen3 decoder: normalized queries and keys, rotary embedding over one axis."""

    kind: Literal["qwen3"] = "qwen3"  # Family of the language model; selects the fields of this section.

    def decoder(self) -> LanguageConfig:
        """Return the properties of the decoder."""
        return self.with_properties(
            attention=self.part(GroupedQueryAttention, qk_norm=True), rope=self.part(RopeConfig)
        )


def read(family: str, text: Keys, root: Keys) -> LanguageConfig:
    """Read a dense decoder with normalized queries and keys."""
    check_optional_windows(text)
    return read_normed(family, text, root, head_dim=128, num_kv_heads=32)


def read_normed(family: str, text: Keys, root: Keys, **defaults: Any) -> LanguageConfig:
    """Read a decoder with normalized queries and keys; `defaults` are arguments of read_grouped_query."""
    bias = text.flag("attention_bias", False)
    return read_grouped_query(family, text, root, qk_norm=True, qkv_bias=bias, output_bias=bias, **defaults)


def write(language: LanguageConfig) -> dict[str, Any]:
    """Return the keys of a decoder with normalized queries and keys."""
    bias = {"attention_bias": True} if grouped_query(language).output_bias else {}
    return write_grouped_query(language) | bias
