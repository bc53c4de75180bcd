# SPDX-License-Identifier: Apache-2.0
"""Configuration of a decoder as a set of properties: attention, rotary embedding, MLP, experts, further prediction.

families/ create it; weights, counts, FLOPs, memory, parallel split and export are functions of it.
All decoders are pre-norm with RMSNorm and gated MLPs (SwiGLU). Names follow the configurations in transformers.
"""

from dataclasses import dataclass
from typing import Literal

from mindvl_model.errors import ModelError

MAX_LAYERS, MAX_SIZE = 1_000, 1 << 24  # above any real model; typing errors are rejected before they allocate memory


@dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention:
    """Attention in which num_heads / num_kv_heads query heads share a key and a value head."""

    kind: Literal["grouped_query"] = "grouped_query"  # Kind of attention; selects the fields of this section.
    num_kv_heads: int  # key-value heads
    head_dim: int  # size of a head
    qkv_bias: bool = False  # biases of the query, key and value projections
    output_bias: bool = False  # bias of the output projection
    qk_norm: bool = False  # RMS norms over each query and key head

    def __post_init__(self) -> None:
        check_range(self, 1, MAX_SIZE, "num_kv_heads", "head_dim")
        check_even(self, "head_dim")

    @property
    def rotary_width(self) -> int:
        """Number of values of a head that the rotary embedding rotates."""
        return self.head_dim

    def linear_sizes(self, hidden_size: int, num_heads: int) -> dict[str, list[tuple[int, int]]]:
        """Input and output sizes of the published linear layers of each linear layer of the model."""
        queries, keys = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "linear_qkv": [(hidden_size, queries), (hidden_size, keys), (hidden_size, keys)],
            "linear_proj": [(queries, hidden_size)],
        }


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention with decoupled rotary embedding (arXiv 2412.19437, section 2.1.1)."""

    kind: Literal["latent"] = "latent"  # Kind of attention; selects the fields of this section.
    q_lora_rank: int | None  # size of the latent of queries; None: queries are projected without a latent
    kv_lora_rank: int  # size of the latent of keys and values
    nope_head_dim: int  # part of the head size without rotary embedding
    rope_head_dim: int  # part of the head size with rotary embedding; all heads share one rotary key
    value_head_dim: int  # size of a value head
    latent_norm_epsilon: float = 1e-6  # epsilon of the norms of the latents

    def __post_init__(self) -> None:
        check_range(
            self, 1, MAX_SIZE, "q_lora_rank", "kv_lora_rank", "nope_head_dim", "rope_head_dim", "value_head_dim"
        )
        check_range(self, 0.0, 1.0, "latent_norm_epsilon")
        check_even(self, "rope_head_dim")

    @property
    def rotary_width(self) -> int:
        """Number of values of a head that the rotary embedding rotates."""
        return self.rope_head_dim

    def linear_sizes(self, hidden_size: int, num_heads: int) -> dict[str, list[tuple[int, int]]]:
        """Input and output sizes of the published linear layers of each linear layer of the model."""
        queries, key_value = (
            num_heads * (self.nope_head_dim + self.rope_head_dim),
            self.nope_head_dim + self.value_head_dim,
        )
        query = {"linear_q_proj": [(hidden_size, queries)]}
        if self.q_lora_rank is not None:
            query = {
                "linear_q_down_proj": [(hidden_size, self.q_lora_rank)],
                "linear_q_up_proj": [(self.q_lora_rank, queries)],
            }
        return query | {
            "linear_kv_down_proj": [(hidden_size, self.kv_lora_rank + self.rope_head_dim)],
            "linear_kv_up_proj": [(self.kv_lora_rank, num_heads * key_value)],
            "linear_proj": [(num_heads * self.value_head_dim, hidden_size)],
        }


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN scaling of rotary frequencies for longer sequences (arXiv 2309.00071)."""

    kind: Literal["yarn"] = "yarn"  # Kind of scaling; selects the fields of this section.
    factor: float = 40.0  # Ratio of the scaled to the original maximum length.
    original_max_positions: int = 4096  # Maximum positions before scaling.
    beta_fast: float = 32.0  # Frequencies with more rotations than this within original_max_positions are kept.
    # Frequencies with fewer rotations than this within original_max_positions are divided by factor.
    beta_slow: float = 1.0
    # Cosine and sine are multiplied by m(mscale) / m(mscale_all_dim), where m(s) = 0.1 * s * ln(factor) + 1.
    mscale: float = 1.0
    # Logits of latent attention are multiplied by m(mscale_all_dim)**2. If one of the two is 0, cosine and sine are
    # multiplied by m(1).
    mscale_all_dim: float = 1.0

    # Factor of cosine and sine in place of the one that mscale and mscale_all_dim give.
    attention_factor: float | None = None
    truncate: bool = True  # round the bounds of the interpolated frequencies to whole pairs

    def __post_init__(self) -> None:
        check_range(self, 1.0, 1e6, "factor")
        check_range(self, 1, 1 << 40, "original_max_positions")
        check_range(self, 1e-6, 1e6, "beta_fast", "beta_slow", "attention_factor")
        check_range(self, 0.0, 1e6, "mscale", "mscale_all_dim")


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Rotary frequencies divided by one factor."""

    kind: Literal["linear"] = "linear"  # Kind of scaling; selects the fields of this section.
    factor: float  # ratio of the scaled to the original maximum length

    def __post_init__(self) -> None:
        check_range(self, 1e-6, 1e6, "factor")


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Rotary frequencies of which low ones are divided by a factor, with a smooth transition ("llama3" in transformers)."""

    kind: Literal["llama3"] = "llama3"  # Kind of scaling; selects the fields of this section.
    factor: float = 8.0  # ratio of the scaled to the original maximum length
    low_freq_factor: float = 1.0  # frequencies with fewer rotations within original_max_positions are divided by factor
    high_freq_factor: float = 4.0  # frequencies with more rotations within original_max_positions are kept
    original_max_positions: int = 8192  # maximum positions before scaling

    def __post_init__(self) -> None:
        check_range(self, 1e-6, 1e6, "factor", "low_freq_factor", "high_freq_factor")
        check_range(self, 1, 1 << 40, "original_max_positions")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                f"high_freq_factor: must be above low_freq_factor={self.low_freq_factor}, got {self.high_freq_factor}. "
                "Change one of them."
            )


RopeScaling = LinearScaling | Llama3Scaling | YarnConfig


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: frequencies, and the axis of each frequency."""

    rotary_base: float = 1_000_000.0  # base of the rotary position embedding (rope_theta in transformers)
    scaling: RopeScaling | None = None  # scaling of the frequencies for longer sequences
    # M-RoPE: rotary frequency pairs of each axis (time, height, width). None: positions along one axis.
    mrope_sections: tuple[int, int, int] | None = None
    # M-RoPE: False: all pairs of an axis follow each other, time first. True: the axes alternate pair by pair while they
    # have pairs left; the remaining pairs are for time.
    sections_interleaved: bool = False
    # Whether a pair consists of neighbouring values of a head; otherwise of values at the same place of both halves.
    interleaved_pairs: bool = False
    # M-RoPE: first position after a video. height_width: its start plus the larger of grid height and width; all_axes:
    # one past the largest position, time included.
    after_video: Literal["height_width", "all_axes"] = "height_width"

    def __post_init__(self) -> None:
        check_range(self, 1.0, 1e30, "rotary_base")
        if self.mrope_sections is not None and min(self.mrope_sections) < 0:
            raise ModelError(f"mrope_sections: must be >= 0, got {list(self.mrope_sections)}. Use numbers >= 0.")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Routed experts in place of the MLP of all layers after the first num_dense_layers layers."""

    num_experts: int  # routed experts of a layer
    experts_per_token: int  # experts that each token is routed to
    expert_ffn_hidden_size: int  # width inside the MLP of an expert
    num_dense_layers: int = 0  # leading layers with a dense MLP
    num_shared_experts: int = 0  # experts that every token uses
    joined: bool = False  # directories have one tensor for the matrices of all experts
    # softmax: probabilities over all experts; sigmoid: one score per expert, with a load-balancing bias that affects the
    # selection only.
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalize_router: bool = True  # scale the weights of the selected experts to sum to 1
    num_expert_groups: int = 1  # groups of experts; a token uses experts of a few groups only
    groups_per_token: int = 1  # groups that a token may use
    routed_scale: float = 1.0  # scaling factor of the output of the routed experts
    aux_loss_weight: float = 0.0  # weight of the auxiliary load-balancing loss
    bias_update_rate: float = 0.0  # change of the router's load-balancing bias per optimizer step

    def __post_init__(self) -> None:
        check_range(self, 1, MAX_SIZE, "num_experts", "expert_ffn_hidden_size", "num_expert_groups", "groups_per_token")
        check_range(self, 0, MAX_LAYERS, "num_shared_experts")
        check_range(self, 0.0, 1e6, "routed_scale", "aux_loss_weight", "bias_update_rate")
        if not 0 < self.experts_per_token <= self.num_experts:
            raise ModelError(
                f"experts_per_token: must be between 1 and num_experts={self.num_experts}, got {self.experts_per_token}. "
                "Change one of them."
            )
        if self.num_experts % self.num_expert_groups or self.groups_per_token > self.num_expert_groups:
            raise ModelError(
                f"num_expert_groups: must divide num_experts={self.num_experts} and be at least groups_per_token="
                f"{self.groups_per_token}, got {self.num_expert_groups}. Change one of them."
            )
        size = self.num_experts // self.num_expert_groups
        if self.num_expert_groups > 1 and not (size > 1 and self.experts_per_token <= self.groups_per_token * size):
            raise ModelError(
                f"experts_per_token: {self.experts_per_token} experts of {self.groups_per_token} groups with {size} experts are "
                "not supported. Use groups of at least 2 experts, and at most as many experts as the groups of a token have."
            )
        if self.router == "softmax" and (self.num_expert_groups > 1 or self.bias_update_rate):
            name = "num_expert_groups" if self.num_expert_groups > 1 else "bias_update_rate"
            raise ModelError(
                f"{name}: {getattr(self, name)} is not supported with a softmax router. Use router: sigmoid, or remove "
                f"{name}."
            )
        if self.router == "sigmoid" and not self.normalize_router:
            raise ModelError(
                "normalize_router: false is not supported with a sigmoid router. Use normalize_router: true."
            )


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """Any decoder by its properties; `family` affects the exported config.json only."""

    kind: Literal["decoder"] = "decoder"  # Family of the language model; selects the fields of this section.
    family: str  # model_type of the decoder in config.json of transformers
    hidden_size: int  # width of the layers
    num_layers: int  # decoder layers
    num_heads: int  # query heads
    ffn_hidden_size: int  # intermediate size of the dense MLP
    vocab_size: int  # embedding rows; grows to the next multiple of 128 if the tokenizer has more tokens
    attention: GroupedQueryAttention | LatentAttention  # attention of all layers
    rope: RopeConfig  # rotary position embedding
    experts: ExpertsConfig | None = None  # None: every layer has a dense MLP
    mlp_bias: bool = False  # biases of the dense MLP
    num_mtp_layers: int = 0  # multi-token prediction layers; layer k predicts the token k positions further ahead
    mtp_loss_weight: float = 0.3  # weight of the multi-token prediction loss
    tie_embeddings: bool = False  # share one matrix between input embedding and output layer
    norm_epsilon: float = 1e-6  # epsilon of RMSNorm
    max_positions: int = 40960  # max_position_embeddings of the exported directory, in tokens
    init_std: float | None = 0.02  # standard deviation of initial weights; None: 1 / sqrt(fan_in), for small models

    def __post_init__(self) -> None:
        check_range(self, 1, MAX_SIZE, "hidden_size", "num_heads", "ffn_hidden_size", "vocab_size")
        check_range(self, 1, MAX_LAYERS, "num_layers")
        check_range(self, 0, MAX_LAYERS, "num_mtp_layers")
        check_range(self, 0.0, 1e6, "mtp_loss_weight")
        check_range(self, 1, 1 << 40, "max_positions")
        check_range(self, 0.0, 1.0, "norm_epsilon")
        check_range(self, 0.0, 1e3, "init_std")
        if self.attention.kind == "grouped_query" and self.num_heads % self.attention.num_kv_heads:
            raise ModelError(
                f"num_heads: must be a multiple of num_kv_heads={self.attention.num_kv_heads}, got {self.num_heads}. "
                "Change one of them."
            )
        if self.num_dense_layers < 0 or self.num_dense_layers > self.num_layers:
            raise ModelError(
                f"num_dense_layers: must be between 0 and num_layers={self.num_layers}, got {self.num_dense_layers}. "
                "Change one of them."
            )
        self._check_rope()

    def _check_rope(self) -> None:
        pairs, sections = self.attention.rotary_width // 2, self.rope.mrope_sections
        if sections is not None and sum(sections) != pairs:
            raise ModelError(
                f"mrope_sections: must add up to head_dim / 2 = {pairs} rotary pairs, got {list(sections)}, which add up "
                f"to {sum(sections)}. Change one of them."
            )
        if self.rope.interleaved_pairs != (self.attention.kind == "latent"):
            raise ModelError(
                f"interleaved_pairs: {self.rope.interleaved_pairs} is not supported with {self.attention.kind} attention. "
                "Pairs are interleaved in latent attention only."
            )

    def decoder(self) -> "LanguageConfig":
        """Return the configuration itself, as presets return theirs."""
        return self

    @property
    def num_dense_layers(self) -> int:
        """Number of leading layers with a dense MLP; the other layers have experts."""
        return self.num_layers if self.experts is None else self.experts.num_dense_layers


def check_even(config: object, name: str) -> None:
    """Check that the size of a rotated head is even, because pairs are rotated.

    Raises:
        ModelError: It is odd.
    """
    if getattr(config, name) % 2:
        raise ModelError(f"{name}: must be even for rotary embedding, got {getattr(config, name)}. Use an even size.")


def check_range(config: object, low: float, high: float, *names: str) -> None:
    """Check that fields of a configuration lie in [low, high]. None is valid, NaN is not.

    Raises:
        ModelError: A value is out of range; the message names the field.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise ModelError(f"{name}: must be between {low} and {high}, got {value}. Use a value in this range.")
