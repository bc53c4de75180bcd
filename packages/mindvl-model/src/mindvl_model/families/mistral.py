# SPDX-License-Identifier: Apache-2.0
"""Mistral decoders (arXiv 2310.06825) without sliding windows, which are refused where they hide positions."""

from dataclasses import dataclass
from typing import Any, Literal

from mindvl_model.families.keys import read_grouped_query, write_grouped_query
from mindvl_model.families.preset import GroupedQueryPreset
from mindvl_model.hf.config_keys import Keys
from mindvl_model.language_config import GroupedQueryAttention, LanguageConfig, RopeConfig


@dataclass(frozen=True, kw_only=True)
class MistralPreset(GroupedQueryPreset):
    """A dense Mistral decoder; the defaults are those of Mistral-7B-v0.3."""

    kind: Literal["mistral"] = "mistral"  # Family of the language model; selects the fields of this section.
    norm_epsilon: float = 1e-5
    max_positions: int = 32_768

    def decoder(self) -> LanguageConfig:
        """Return the properties of the decoder."""
        return self.with_properties(attention=self.part(GroupedQueryAttention), rope=self.part(RopeConfig))


def read(family: str, text: Keys, root: Keys) -> LanguageConfig:
    """Read a Mistral decoder; transformers gives it a window of 4096 positions if config.json has no key for it."""
    text.check_window(text.take("sliding_window", 4096))
    return read_grouped_query(family, text, root, num_kv_heads=8)


def write(language: LanguageConfig) -> dict[str, Any]:
    """Return the keys of a Mistral decoder."""
    return write_grouped_query(language) | {"sliding_window": None}
