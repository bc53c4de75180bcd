# SPDX-License-Identifier: Apache-2.0
"""Llama decoders (arXiv 2407.21783), and models of their form such as SmolLM2: no norms of queries and keys."""

from dataclasses import dataclass
from typing import Any, Literal

from mindvl_model.families.keys import grouped_query, read_grouped_query, write_grouped_query
from mindvl_model.families.preset import GroupedQueryPreset
from mindvl_model.hf.config_keys import Keys
from mindvl_model.language_config import GroupedQueryAttention, LanguageConfig, Llama3Scaling, RopeConfig


@dataclass(frozen=True, kw_only=True)
class LlamaPreset(GroupedQueryPreset):
    """A dense Llama decoder; the defaults are those of Llama 3.1."""

    kind: Literal["llama"] = "llama"  # Family of the language model; selects the fields of this section.
    attention_bias: bool = False  # biases of the query, key, value and output projections
    mlp_bias: bool = False  # biases of the MLP
    # Scaling of the rotary frequencies for longer sequences; null: no scaling. {} has the values of Llama 3.1.
    rope_scaling: Llama3Scaling | None = None
    rotary_base: float = 500_000.0
    norm_epsilon: float = 1e-5
    max_positions: int = 131_072

    def decoder(self) -> LanguageConfig:
        """Return the properties of the decoder."""
        return self.with_properties(
            attention=self.part(GroupedQueryAttention, qkv_bias=self.attention_bias, output_bias=self.attention_bias),
            rope=self.part(RopeConfig, scaling=self.rope_scaling),
        )


def read(family: str, text: Keys, root: Keys) -> LanguageConfig:
    """Read a Llama decoder."""
    bias = text.flag("attention_bias", False)
    text.take("is_llama_config", None)  # written by the training code of SmolLM2, without effect
    text.only("rope_interleaved", False, None)
    return read_grouped_query(
        family, text, root, qkv_bias=bias, output_bias=bias, mlp_bias=text.flag("mlp_bias", False)
    )


def write(language: LanguageConfig) -> dict[str, Any]:
    """Return the keys of a Llama decoder."""
    return write_grouped_query(language) | {
        "attention_bias": grouped_query(language).qkv_bias,
        "mlp_bias": language.mlp_bias,
    }
