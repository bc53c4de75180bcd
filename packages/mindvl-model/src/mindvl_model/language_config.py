# SPDX-License-Identifier: Apache-2.0
"""Configurations of the language models, one dataclass per family; `kind` selects the family.

Names and meanings follow the configurations in transformers.
"""

from dataclasses import dataclass, field
from typing import Literal

from mindvl_model.errors import ModelError

MAX_LAYERS, MAX_SIZE = 1_000, 1 << 24  # above any real model; typing errors are rejected before they allocate memory


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Fields of every pre-norm decoder with a gated MLP."""

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
        check_range(self, 1, MAX_SIZE, "hidden_size", "num_heads", "ffn_hidden_size", "vocab_size")
        check_range(self, 1, MAX_LAYERS, "num_layers")
        check_range(self, 1, 1 << 40, "max_positions")
        check_range(self, 1.0, 1e30, "rotary_base")
        check_range(self, 0.0, 1.0, "norm_epsilon")
        check_range(self, 0.0, 1e3, "init_std")


@dataclass(frozen=True, kw_only=True)
class GroupedQueryConfig(DecoderConfig):
    """A decoder with grouped-query attention."""

    num_kv_heads: int  # key-value heads
    head_dim: int  # size of a head

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 1, MAX_SIZE, "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads: must be a multiple of num_kv_heads={self.num_kv_heads}, got {self.num_heads}. "
                "Change one of them."
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim: must be even for rotary embedding, got {self.head_dim}. Use an even size.")


@dataclass(frozen=True, kw_only=True)
class Qwen2LanguageConfig(GroupedQueryConfig):
    """The dense Qwen2 decoder of Qwen2.5-VL: biased query, key and value projections, rotary over three axes (M-RoPE)."""

    kind: Literal["qwen2"] = "qwen2"  # Family of the language model; selects the fields of this section.
    mrope_sections: tuple[int, int, int] = (16, 24, 24)  # Rotary frequency pairs per axis: time, height, width.
    # First position after a video. height_width: its start plus the larger of grid height and width (transformers 5.3
    # and later); all_axes: one past the largest position, time included (earlier versions).
    after_video: Literal["height_width", "all_axes"] = "height_width"
    max_positions: int = 128_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.mrope_sections) < 0:
            raise ModelError(f"mrope_sections: must be >= 0, got {list(self.mrope_sections)}. Use numbers >= 0.")
        if 2 * sum(self.mrope_sections) != self.head_dim:
            raise ModelError(
                f"mrope_sections: must add up to head_dim / 2 = {self.head_dim // 2} rotary pairs, got "
                f"{list(self.mrope_sections)}, which add up to {sum(self.mrope_sections)}. Change one of them."
            )


@dataclass(frozen=True, kw_only=True)
class Qwen3LanguageConfig(GroupedQueryConfig):
    """A dense Qwen3 decoder: normalized queries and keys, rotary embedding over one axis."""

    kind: Literal["qwen3"] = "qwen3"  # Family of the language model; selects the fields of this section.


@dataclass(frozen=True, kw_only=True)
class Qwen3MoELanguageConfig(GroupedQueryConfig):
    """A Qwen3 decoder with experts and a softmax router in place of the MLPs."""

    kind: Literal["qwen3_moe"] = "qwen3_moe"  # Family of the language model; selects the fields of this section.
    num_experts: int  # experts of a layer
    experts_per_token: int  # experts that each token is routed to
    expert_ffn_hidden_size: int  # width inside the MLP of an expert
    normalize_router: bool = True  # scale the probabilities of the selected experts to sum to 1
    aux_loss_weight: float = 0.001  # weight of the auxiliary load-balancing loss

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 1, MAX_SIZE, "num_experts", "expert_ffn_hidden_size")
        check_range(self, 0.0, 1e6, "aux_loss_weight")
        check_experts(self.num_experts, self.experts_per_token)


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN scaling of rotary frequencies for longer sequences (arXiv 2309.00071), as in DeepSeek-V3."""

    factor: float = 40.0  # Ratio of the scaled to the original maximum length.
    original_max_positions: int = 4096  # Maximum positions before scaling.
    beta_fast: float = 32.0  # Frequencies with more rotations than this within original_max_positions are kept.
    # Frequencies with fewer rotations than this within original_max_positions are divided by factor.
    beta_slow: float = 1.0
    # Cosine and sine are multiplied by m(mscale) / m(mscale_all_dim), where m(s) = 0.1 * s * ln(factor) + 1.
    mscale: float = 1.0
    mscale_all_dim: float = 1.0  # Attention logits are multiplied by m(mscale_all_dim)**2; 0: no scaling.

    def __post_init__(self) -> None:
        check_range(self, 1.0, 1e6, "factor")
        check_range(self, 1, 1 << 40, "original_max_positions")
        check_range(self, 1e-6, 1e6, "beta_fast", "beta_slow")
        check_range(self, 0.0, 1e6, "mscale", "mscale_all_dim")


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3LanguageConfig(DecoderConfig):
    """A DeepSeek-V3 decoder: latent attention, dense layers first, then sigmoid-routed experts (arXiv 2412.19437)."""

    kind: Literal["deepseek_v3"] = "deepseek_v3"  # Family of the language model; selects the fields of this section.
    q_lora_rank: int  # size of the latent of queries
    kv_lora_rank: int  # size of the latent of keys and values
    nope_head_dim: int  # part of the head size without rotary embedding
    rope_head_dim: int  # Part of the head size with rotary embedding; all heads share one rotary key.
    value_head_dim: int  # size of a value head
    num_dense_layers: int  # Leading layers with a dense MLP; all later layers have experts.
    num_experts: int  # routed experts of a layer
    experts_per_token: int  # experts that each token is routed to
    expert_ffn_hidden_size: int  # width inside the MLP of an expert
    num_shared_experts: int = 1  # experts that every token uses
    num_expert_groups: int = 8  # groups of experts; a token uses experts of a few groups only
    groups_per_token: int = 4  # groups that a token may use
    # Scaling factor of the output of the routed experts (routed_scaling_factor in transformers).
    routed_scale: float = 2.5
    bias_update_rate: float = 0.001  # change of the router's load-balancing bias per optimizer step
    num_mtp_layers: int = 1  # Multi-token prediction layers; layer k predicts the token k positions further ahead.
    mtp_loss_weight: float = 0.3  # weight of the multi-token prediction loss
    # YaRN scaling of the rotary frequencies; default: the values of DeepSeek-V3 (factor 40); None: no scaling.
    yarn: YarnConfig | None = field(default_factory=YarnConfig)
    rotary_base: float = 10_000.0
    max_positions: int = 163_840

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("q_lora_rank", "kv_lora_rank", "nope_head_dim", "rope_head_dim", "value_head_dim")
        experts = ("num_experts", "expert_ffn_hidden_size", "num_expert_groups", "groups_per_token")
        check_range(self, 1, MAX_SIZE, *sizes, *experts)
        check_range(self, 0, MAX_LAYERS, "num_shared_experts", "num_mtp_layers")
        check_range(self, 0.0, 1e6, "routed_scale", "bias_update_rate", "mtp_loss_weight")
        check_experts(self.num_experts, self.experts_per_token)
        if self.num_experts % self.num_expert_groups or self.groups_per_token > self.num_expert_groups:
            raise ModelError(
                f"num_expert_groups: must divide num_experts={self.num_experts} and be at least groups_per_token="
                f"{self.groups_per_token}, got {self.num_expert_groups}. Change one of them."
            )
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ModelError(
                f"num_dense_layers: must be between 0 and num_layers={self.num_layers}, got {self.num_dense_layers}. "
                "Change one of them."
            )
        if self.rope_head_dim % 2:
            raise ModelError(
                f"rope_head_dim: must be even for rotary embedding, got {self.rope_head_dim}. Use an even size."
            )


LanguageConfig = Qwen2LanguageConfig | Qwen3LanguageConfig | Qwen3MoELanguageConfig | DeepSeekV3LanguageConfig

FAMILIES: dict[str, type[LanguageConfig]] = {
    "qwen2": Qwen2LanguageConfig,
    "qwen3": Qwen3LanguageConfig,
    "qwen3_moe": Qwen3MoELanguageConfig,
    "deepseek_v3": DeepSeekV3LanguageConfig,
}


def check_experts(num_experts: int, experts_per_token: int) -> None:
    """Check that a router can select `experts_per_token` experts.

    Raises:
        ModelError: It cannot.
    """
    if not 0 < experts_per_token <= num_experts:
        raise ModelError(
            f"experts_per_token: must be between 1 and num_experts={num_experts}, got {experts_per_token}. "
            "Change one of them."
        )


def check_range(config: object, low: float, high: float, *names: str) -> None:
    """Check that fields of a configuration lie in [low, high]. None is valid, NaN is not.

    Raises:
        ModelError: A value is out of range; the message names the field.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise ModelError(f"{name}: must be between {low} and {high}, got {value}. Use a value in this range.")
