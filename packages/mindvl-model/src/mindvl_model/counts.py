# SPDX-License-Identifier: Apache-2.0
"""Number of parameters by part, and of activated parameters per token, from the configuration.

Used by the layout search and by reports. The counts are exact: tests compare them with the model on the meta device and
with published totals. The load-balancing biases of routers are buffers and not counted.
"""

from dataclasses import asdict, dataclass

from mindvl_model.config import MindVLConfig, VisionConfig
from mindvl_model.language_config import GroupedQueryAttention, LanguageConfig, LatentAttention


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
        mtp=language.num_mtp_layers * (extra.total + 2 * language.hidden_size**2 + 3 * language.hidden_size)
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
    dense, routed = _layer(config, dense=True), _layer(config, dense=False)
    return [dense] * config.num_dense_layers + [routed] * (config.num_layers - config.num_dense_layers)


def mtp_layer(config: LanguageConfig) -> LayerCounts | None:
    """Counts of the transformer layer in a multi-token prediction layer; None for models without one."""
    return _layer(config, dense=False) if config.num_mtp_layers else None


def _layer(config: LanguageConfig, *, dense: bool) -> LayerCounts:
    """Counts of a layer; `dense` has no effect on a model without experts."""
    hidden, attention, experts = config.hidden_size, config.attention, config.experts
    if attention.kind == "grouped_query":
        parameters = _grouped_query_attention(attention, hidden, config.num_heads)
    else:
        parameters = _latent_attention(attention, hidden, config.num_heads)
    if dense or experts is None:
        ffn = config.ffn_hidden_size
        mlp = 3 * hidden * ffn + (2 * ffn + hidden if config.mlp_bias else 0)
        return LayerCounts(attention=parameters, norms=2 * hidden, dense_mlp=mlp)
    expert = 3 * hidden * experts.expert_ffn_hidden_size
    return LayerCounts(
        attention=parameters,
        norms=2 * hidden,
        router=experts.num_experts * hidden,
        shared_experts=experts.num_shared_experts * expert,
        experts=experts.num_experts * expert,
        active_experts=experts.experts_per_token * expert,
    )


def _grouped_query_attention(attention: GroupedQueryAttention, hidden: int, num_heads: int) -> int:
    size = attention.head_dim
    qkv_size = (num_heads + 2 * attention.num_kv_heads) * size
    count = qkv_size * hidden + num_heads * size * hidden
    return count + qkv_size * attention.qkv_bias + hidden * attention.output_bias + 2 * size * attention.qk_norm


def _latent_attention(attention: LatentAttention, hidden: int, num_heads: int) -> int:
    nope, rope, value = attention.nope_head_dim, attention.rope_head_dim, attention.value_head_dim
    query, rank = hidden * num_heads * (nope + rope), attention.q_lora_rank
    if rank is not None:
        query = rank * (hidden + 1 + num_heads * (nope + rope))
    key_value = hidden * (attention.kv_lora_rank + rope) + attention.kv_lora_rank * (1 + num_heads * (nope + value))
    return query + key_value + num_heads * value * hidden
