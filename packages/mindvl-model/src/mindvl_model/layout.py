# SPDX-License-Identifier: Apache-2.0
"""How a model is spread over processes and computed: sizes, and which layers stand in which chunk of a pipeline.

Plain numbers without megatron-core; comes before megatron/blocks.py, which builds by it.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from mindvl_model.config import MindVLConfig
from mindvl_model.errors import ModelError
from mindvl_model.language_config import DeepSeekV3LanguageConfig


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is spread and computed; the defaults are one process in fp32."""

    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1  # experts are spread over ranks of tp, cp and dp; others do not notice
    virtual_stages: int = 1  # chunks of the model on each pipeline rank, interleaved
    stage_layers: tuple[int, ...] | None = None  # language layers of each chunk, first to last; None: as even as can be
    spread_images: bool = False  # each tp and cp peer encodes a part of the images instead of all
    recompute: Literal["none", "selective", "full"] = "none"  # what backward computes again
    recompute_layers: int | None = None  # with full: how many of each chunk's language layers; None: all
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.virtual_stages > 1 and self.pp_size == 1:
            raise ModelError(
                f"virtual_stages={self.virtual_stages} with pp_size=1: there is no pipeline to interleave. Layout. "
                "Use virtual_stages=1, or pp_size above 1."
            )
        if self.recompute_layers is not None and self.recompute != "full":
            raise ModelError(
                f'recompute_layers={self.recompute_layers} with recompute="{self.recompute}". Layout. Whole layers '
                'are computed again with recompute="full" only; use that, or leave recompute_layers out.'
            )

    @property
    def sequence_parallel(self) -> bool:
        """With tensor parallel always on: norms and dropout then work on a slice of the pack."""
        return self.tp_size > 1

    @property
    def num_chunks(self) -> int:
        """Parts the language model is cut into, one after the other: each pipeline rank has virtual_stages of them."""
        return self.pp_size * self.virtual_stages

    @property
    def of_vision(self) -> "Layout":
        """VisionEncoder and projector: whole on the first chunk, and on every tp rank where each encodes other images."""
        return Layout(
            tp_size=1 if self.spread_images else self.tp_size,
            recompute=self.recompute,
            dtype=self.dtype,
        )

    def padded_length(self, num_tokens: int) -> int:
        """Length a pack of num_tokens is padded to inside the model: every cp and tp rank has an equal slice."""
        slices = self.cp_size * self.tp_size
        return -(-num_tokens // slices) * slices


def chunk_layers(num_layers: int, layout: Layout) -> tuple[int, ...]:
    """Language layers of each chunk of the pipeline, first to last; chunk c stands on pipeline rank c % pp_size.

    Unless the layout says otherwise as even as can be. What is left over goes to the last chunks, because the first
    one has the vision encoder, too.

    Raises:
        ModelError: A pipeline rank would hold nothing; stage_layers has another number of chunks or of layers.
    """
    chunks = layout.num_chunks
    if layout.stage_layers is None:
        if layout.pp_size > num_layers + 1 or layout.virtual_stages > num_layers:
            raise ModelError(
                f"pp_size={layout.pp_size} with virtual_stages={layout.virtual_stages}: pipeline stages of "
                f"{num_layers} language layers would hold nothing. Layout. Use at most {num_layers} of each."
            )
        each, more = divmod(num_layers, chunks)
        return (each,) * (chunks - more) + (each + 1,) * more
    if len(layout.stage_layers) != chunks:
        raise ModelError(
            f"stage_layers={list(layout.stage_layers)} has {len(layout.stage_layers)} entries, but pp_size="
            f"{layout.pp_size} with virtual_stages={layout.virtual_stages} makes {chunks} chunks. Layout. Give one "
            "number of layers for each chunk."
        )
    if min(layout.stage_layers) < 0 or sum(layout.stage_layers) != num_layers:
        raise ModelError(
            f"stage_layers={list(layout.stage_layers)} add up to {sum(layout.stage_layers)}, but the language model "
            f"has {num_layers} layers. Layout. Give counts from 0 that add up to it."
        )
    return layout.stage_layers


def check_layout(config: MindVLConfig, layout: Layout) -> None:
    """Refuse sizes that cannot split the model, before anything is built.

    Raises:
        ModelError: By the name of what cannot be split.
    """
    language, vision, tp_size = config.language, config.vision, layout.tp_size
    slices = tp_size * layout.cp_size
    if language.num_heads % slices:
        raise ModelError(
            f"tp_size={tp_size} times cp_size={layout.cp_size} cannot split language.num_heads={language.num_heads}: "
            f"attention deals its heads to {slices} ranks. Layout. Use sizes whose product divides it."
        )
    wanted = {"language.ffn_hidden_size": language.ffn_hidden_size, "language.vocab_size": language.vocab_size}
    if isinstance(language, DeepSeekV3LanguageConfig):
        shared = language.expert_ffn_hidden_size * language.num_shared_experts
        wanted["language.expert_ffn_hidden_size * num_shared_experts"] = shared
    if not layout.spread_images:
        wanted |= {"vision.num_heads": vision.num_heads, "vision.ffn_hidden_size": vision.ffn_hidden_size}
        wanted["vision.hidden_size * spatial_merge_size**2"] = vision.hidden_size * vision.spatial_merge_size**2
    for name, size in wanted.items():
        if size % tp_size:
            remedy = " or spread_images=True" if name.startswith("vision") else ""
            raise ModelError(f"tp_size={tp_size} cannot split {name}={size}. Layout. Use a divisor{remedy}.")
    kv_heads = getattr(language, "num_kv_heads", tp_size)
    if kv_heads % tp_size and tp_size % kv_heads:
        raise ModelError(
            f"tp_size={tp_size} cannot split language.num_kv_heads={kv_heads}. Layout. Use a divisor or a multiple."
        )
    num_experts = getattr(language, "num_experts", 0)
    if num_experts % layout.ep_size:
        raise ModelError(f"ep_size={layout.ep_size} cannot split num_experts={num_experts}. Layout. Use a divisor.")
    chunk_layers(language.num_layers, layout)
