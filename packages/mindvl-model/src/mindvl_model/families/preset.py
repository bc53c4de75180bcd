# SPDX-License-Identifier: Apache-2.0
"""The base of presets: the sizes that the decoders of a family vary, from which the preset makes all properties.

A recipe selects a preset by `kind` under `model.language`; `decoder()` returns its properties (language_config.py). The
file of each family has its preset and its keys of config.json; registry.py lists the families.
"""

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from mindvl_model.language_config import LanguageConfig

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Fields of every preset."""

    hidden_size: int  # width of the layers
    num_layers: int  # decoder layers
    num_heads: int  # query heads
    ffn_hidden_size: int  # Intermediate size of the dense MLP.
    vocab_size: int  # embedding rows; grows to the next multiple of 128 if the tokenizer has more tokens
    tie_embeddings: bool = False  # share one matrix between input embedding and output layer
    rotary_base: float = 1_000_000.0  # base of the rotary position embedding
    norm_epsilon: float = 1e-6  # epsilon of RMSNorm
    max_positions: int = 40960  # max_position_embeddings of the exported directory, in tokens
    init_std: float | None = 0.02  # standard deviation of initial weights; None: 1 / sqrt(fan_in), for small models

    def __post_init__(self) -> None:
        self.decoder()  # type: ignore[attr-defined]  # of the family; checks the values

    def with_properties(self, **properties: Any) -> LanguageConfig:
        """Create the decoder from the fields of the same names and from further properties."""
        return self.part(LanguageConfig, family=self.kind, **properties)  # type: ignore[attr-defined]

    def part(self, cls: type[T], **properties: Any) -> T:
        """Create a part of the configuration from the fields of the same names and from further properties."""
        given = {one.name: getattr(self, one.name) for one in fields(cls) if hasattr(self, one.name)}  # type: ignore[arg-type]
        given.pop("kind", None)
        return cls(**given | properties)


@dataclass(frozen=True, kw_only=True)
class GroupedQueryPreset(Preset):
    """A preset with grouped-query attention."""

    num_kv_heads: int  # key-value heads
    head_dim: int  # size of a head
