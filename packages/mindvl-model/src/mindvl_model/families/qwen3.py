# SPDX-License-Identifier: Apache-2.0
"""Dense Qwen3 decoders: normalized queries and keys, rotary embedding over one axis."""

from dataclasses import dataclass
from typing import Any, Literal

from mindvl_model.errors import WeightError
from mindvl_model.families.keys import check_no_scaling, decoder_sizes, grouped_query, rotary_keys, write_decoder
from mindvl_model.families.preset import GroupedQueryPreset
from mindvl_model.hf.config_keys import Keys
from mindvl_model.language_config import ExpertsConfig, GroupedQueryAttention, LanguageConfig, RopeConfig


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
    return read_normed(family, text, root, None)


def read_normed(family: str, text: Keys, root: Keys, experts: ExpertsConfig | None) -> LanguageConfig:
    """A decoder with normalized queries and keys."""
    theta, kind, more = rotary_keys(text, 1_000_000.0)
    if "mrope_section" in more:
        raise WeightError(
            f"{text.where}: mrope_section={more['mrope_section']!r:.60} is not supported, because Qwen3 has positions "
            "along one axis. Use another directory."
        )
    check_no_scaling(text, kind, more)
    return LanguageConfig(
        family=family,
        **decoder_sizes(text, root),
        attention=GroupedQueryAttention(
            num_kv_heads=text.number("num_key_value_heads"), head_dim=text.number("head_dim", 128), qk_norm=True
        ),
        rope=RopeConfig(rotary_base=theta),
        experts=experts,
    )


def write(language: LanguageConfig) -> dict[str, Any]:
    attention = grouped_query(language)
    return write_decoder(language) | {
        "num_key_value_heads": attention.num_kv_heads,
        "model_type": language.family,
        "head_dim": attention.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": language.rope.rotary_base},
    }
