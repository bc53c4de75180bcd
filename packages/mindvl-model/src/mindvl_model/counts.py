# SPDX-License-Identifier: Apache-2.0
"""Parameters by part, and those that one token meets, from the configuration alone.

Comes after config.py; a planner and reports read it. Exact: tests hold it against the model built on the meta device
and against published totals. The routers' balancing biases are buffers and are not counted.
"""

from dataclasses import asdict, dataclass

from mindvl_model.config import MindVLConfig, VisionConfig
from mindvl_model.language_config import (
    DeepSeekV3LanguageConfig,
    GroupedQueryConfig,
    LanguageConfig,
    Qwen2LanguageConfig,
    Qwen3MoELanguageConfig,
)


@dataclass(frozen=True, kw_only=True)
class LayerCounts:
    """Parameters of one decoder layer."""

    attention: int  # projections, with their biases and the norms inside of attention
    norms: int  # before attention and before the MLP
    dense_mlp: int = 0
    router: int = 0
    shared_experts: int = 0
    experts: int = 0  # all of them
    active_experts: int = 0  # those that one token is sent to

    @property
    def total(self) -> int:
        """All of the layer."""
        return self.attention + self.norms + self.dense_mlp + self.router + self.shared_experts + self.experts


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters by part. The language fields leave out multi-token prediction, which `mtp` holds whole."""

    vision: int  # patch embedding and layers
    projector: int  # the merger: one norm, two linear layers
    embedding: int
    head: int  # 0 where it is the embedding
    attention: int
    dense_mlp: int
    router: int
    shared_experts: int
    experts: int  # all routed ones
    norms: int  # of layers and at the end; those inside of attention stand there
    mtp: int  # its own parameters; embedding and head are the model's
    active_experts: int  # of `experts`, met by one token

    @property
    def language(self) -> int:
        """The decoder without multi-token prediction."""
        return self.total - self.vision - self.projector - self.mtp

    @property
    def activated(self) -> int:
        """Language parameters that one token is multiplied with.

        All but the experts it is not sent to and the input embedding, of which it reads one pack; a tied embedding is
        the head too and counts. DeepSeek-V3: 36.6B, published as 37B. Qwen3 counts its input embedding as well.
        """
        looked_up = self.embedding if self.head else 0
        return self.language - looked_up - self.experts + self.active_experts

    @property
    def total(self) -> int:
        """Everything that is trained."""
        fields = asdict(self)
        return sum(fields.values()) - self.active_experts

    def as_dict(self) -> dict[str, int]:
        """Fields and sums, for JSON."""
        return asdict(self) | {"language": self.language, "activated": self.activated, "total": self.total}


def count_parameters(config: MindVLConfig) -> Counts:
    """Exact counts of a whole model."""
    language = config.language
    layers = layers_of(language)
    extra = mtp_layer(language)
    matrix = language.vocab_size * language.hidden_size
    return Counts(
        vision=vision_parameters(config.vision),
        projector=projector_parameters(config.vision, language.hidden_size),
        embedding=matrix,
        head=0 if language.tie_embeddings else matrix,
        attention=sum(layer.attention for layer in layers),
        dense_mlp=sum(layer.dense_mlp for layer in layers),
        router=sum(layer.router for layer in layers),
        shared_experts=sum(layer.shared_experts for layer in layers),
        experts=sum(layer.experts for layer in layers),
        norms=sum(layer.norms for layer in layers) + language.hidden_size,
        # Two norms and a matrix join hidden state and embedding, one norm ends the depth.
        mtp=num_mtp_layers(language) * (extra.total + 2 * language.hidden_size**2 + 3 * language.hidden_size)
        if extra is not None
        else 0,
        active_experts=sum(layer.active_experts for layer in layers),
    )


def vision_parameters(config: VisionConfig) -> int:
    """The vision encoder: patch embedding without bias; each layer has biased linear layers and two norms."""
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    patch_embed = config.in_channels * config.temporal_patch_size * config.patch_size**2 * hidden
    attention = 4 * (hidden**2 + hidden)
    mlp = 3 * hidden * ffn + 2 * ffn + hidden
    return patch_embed + config.num_layers * (attention + mlp + 2 * hidden)


def projector_parameters(config: VisionConfig, output_size: int) -> int:
    """One norm over patches, two biased linear layers over merge blocks."""
    block = config.hidden_size * config.spatial_merge_size**2
    return config.hidden_size + (block + 1) * block + (block + 1) * output_size


def layers_of(config: LanguageConfig) -> list[LayerCounts]:
    """Each decoder layer, first to last."""
    if isinstance(config, DeepSeekV3LanguageConfig):
        num_routed = config.num_layers - config.num_dense_layers
        return [_latent_layer(config, dense=True)] * config.num_dense_layers + [
            _latent_layer(config, dense=False)
        ] * num_routed
    return [_grouped_query_layer(config)] * config.num_layers


def num_mtp_layers(config: LanguageConfig) -> int:
    """Depths of multi-token prediction."""
    return config.num_mtp_layers if isinstance(config, DeepSeekV3LanguageConfig) else 0


def mtp_layer(config: LanguageConfig) -> LayerCounts | None:
    """The transformer layer in each depth of multi-token prediction, None where there is none."""
    if isinstance(config, DeepSeekV3LanguageConfig) and config.num_mtp_layers:
        return _latent_layer(config, dense=False)
    return None


def _grouped_query_layer(config: GroupedQueryConfig) -> LayerCounts:
    hidden, head = config.hidden_size, config.head_dim
    qkv_size = (config.num_heads + 2 * config.num_kv_heads) * head
    attention = qkv_size * hidden + config.num_heads * head * hidden
    attention += qkv_size if isinstance(config, Qwen2LanguageConfig) else 2 * head  # biases, or two norms of a head
    if isinstance(config, Qwen3MoELanguageConfig):
        expert = 3 * hidden * config.expert_ffn_hidden_size
        return LayerCounts(
            attention=attention,
            norms=2 * hidden,
            router=config.num_experts * hidden,
            experts=config.num_experts * expert,
            active_experts=config.experts_per_token * expert,
        )
    return LayerCounts(attention=attention, norms=2 * hidden, dense_mlp=3 * hidden * config.ffn_hidden_size)


def _latent_layer(config: DeepSeekV3LanguageConfig, *, dense: bool) -> LayerCounts:
    hidden, heads = config.hidden_size, config.num_heads
    query = config.q_lora_rank * (hidden + 1 + heads * (config.nope_head_dim + config.rope_head_dim))
    key_value = hidden * (config.kv_lora_rank + config.rope_head_dim)
    key_value += config.kv_lora_rank * (1 + heads * (config.nope_head_dim + config.value_head_dim))
    attention = query + key_value + heads * config.value_head_dim * hidden
    if dense:
        return LayerCounts(attention=attention, norms=2 * hidden, dense_mlp=3 * hidden * config.ffn_hidden_size)
    expert = 3 * hidden * config.expert_ffn_hidden_size
    return LayerCounts(
        attention=attention,
        norms=2 * hidden,
        router=config.num_experts * hidden,
        shared_experts=config.num_shared_experts * expert,
        experts=config.num_experts * expert,
        active_experts=config.experts_per_token * expert,
    )
