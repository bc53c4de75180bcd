# SPDX-License-Identifier: Apache-2.0
"""Number of parameters by part, and of activated parameters per token, from the configuration.

Used by the layout search and by reports. The counts are exact: tests compare them with the model on the meta device and
with published totals. The load-balancing biases of routers are buffers and not counted.
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
    """Number of parameters of one decoder layer."""

    attention: int  # projections with biases, and the norms inside attention
    norms: int  # before attention and before the MLP
    dense_mlp: int = 0
    router: int = 0
    shared_experts: int = 0
    experts: int = 0  # all routed experts
    active_experts: int = 0  # routed experts of one token

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.attention + self.norms + self.dense_mlp + self.router + self.shared_experts + self.experts


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Number of parameters by part. All parameters of multi-token prediction are counted in `mtp` only."""

    vision: int  # patch embedding and layers
    projector: int  # the merger: one norm, two linear layers
    embedding: int
    head: int  # output layer; 0 if tied to the embedding
    attention: int
    dense_mlp: int
    router: int
    shared_experts: int
    experts: int  # all routed experts
    norms: int  # of layers and the final norm; norms inside attention are counted there
    mtp: int  # without embedding and output layer, which it shares with the model
    active_experts: int  # routed experts of one token, contained in `experts`

    @property
    def language(self) -> int:
        """The decoder without multi-token prediction."""
        return self.total - self.vision - self.projector - self.mtp

    @property
    def activated(self) -> int:
        """Language parameters activated per token.

        Excludes the experts that are not selected, and the input embedding, of which a token reads one row; a tied
        embedding is also the output layer and is included. DeepSeek-V3: 36.6B, published as 37B. Qwen3 publishes counts
        that include the input embedding.
        """
        looked_up = self.embedding if self.head else 0
        return self.language - looked_up - self.experts + self.active_experts

    @property
    def total(self) -> int:
        """All parameters."""
        fields = asdict(self)
        return sum(fields.values()) - self.active_experts

    def as_dict(self) -> dict[str, int]:
        """Fields and sums, for JSON."""
        return asdict(self) | {"language": self.language, "activated": self.activated, "total": self.total}


def count_parameters(config: MindVLConfig) -> Counts:
    """Count the parameters of a whole model."""
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
        # Two norms and a projection combine hidden states and embeddings; one norm follows the transformer layer.
        mtp=num_mtp_layers(language) * (extra.total + 2 * language.hidden_size**2 + 3 * language.hidden_size)
        if extra is not None
        else 0,
        active_experts=sum(layer.active_experts for layer in layers),
    )


def vision_parameters(config: VisionConfig) -> int:
    """Parameters of the vision encoder: embeddings of patches and positions; layers of biased linear layers and two norms."""
    hidden, ffn, entry = config.hidden_size, config.ffn_hidden_size, config.entry
    patch_embed = config.in_channels * config.temporal_patch_size * config.patch_size**2 * hidden
    embeddings = patch_embed + (entry.patch_bias + config.num_position_embeddings) * hidden
    attention = 4 * (hidden**2 + hidden)
    wide = 2 if entry.gated else 1  # matrices into the MLP
    mlp = (wide + 1) * hidden * ffn + wide * ffn + hidden
    return embeddings + config.num_layers * (attention + mlp + 2 * _norm(hidden, config))


def projector_parameters(config: VisionConfig, output_size: int) -> int:
    """Parameters of the projector: mergers of a norm and two biased linear layers over merge blocks.

    The norm is over patches, those of deepstack layers over merge blocks.
    """
    block, num_deepstack = config.hidden_size * config.spatial_merge_size**2, len(config.deepstack_layers)
    linear = (block + 1) * block + (block + 1) * output_size
    return _norm(config.hidden_size, config) + num_deepstack * _norm(block, config) + (1 + num_deepstack) * linear


def _norm(size: int, config: VisionConfig) -> int:
    return 2 * size if config.entry.norm_bias else size


def layers_of(config: LanguageConfig) -> list[LayerCounts]:
    """Counts of each decoder layer, first to last."""
    if isinstance(config, DeepSeekV3LanguageConfig):
        num_routed = config.num_layers - config.num_dense_layers
        return [_latent_layer(config, dense=True)] * config.num_dense_layers + [
            _latent_layer(config, dense=False)
        ] * num_routed
    return [_grouped_query_layer(config)] * config.num_layers


def num_mtp_layers(config: LanguageConfig) -> int:
    """Number of multi-token prediction layers."""
    return config.num_mtp_layers if isinstance(config, DeepSeekV3LanguageConfig) else 0


def mtp_layer(config: LanguageConfig) -> LayerCounts | None:
    """Counts of the transformer layer in a multi-token prediction layer; None for models without one."""
    if isinstance(config, DeepSeekV3LanguageConfig) and config.num_mtp_layers:
        return _latent_layer(config, dense=False)
    return None


def _grouped_query_layer(config: GroupedQueryConfig) -> LayerCounts:
    hidden, head = config.hidden_size, config.head_dim
    qkv_size = (config.num_heads + 2 * config.num_kv_heads) * head
    attention = qkv_size * hidden + config.num_heads * head * hidden
    attention += qkv_size if isinstance(config, Qwen2LanguageConfig) else 2 * head  # biases, or two norms over a head
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
