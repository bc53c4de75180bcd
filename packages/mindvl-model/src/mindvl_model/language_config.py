# SPDX-License-Identifier: Apache-2.0
"""What a language model is, by family; names and meanings follow the configurations in transformers.

One dataclass for each family, told apart by `kind`; they share the fields of every decoder.
"""

from dataclasses import dataclass, field
from typing import Literal

from mindvl_model.errors import ModelError

MAX_LAYERS, MAX_SIZE = 1_000, 1 << 24  # beyond any model; a slip of the keyboard is refused before it takes memory


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What every pre-norm decoder with a gated MLP has."""

    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_hidden_size: int  # of a dense layer's MLP
    vocab_size: int
    tie_embeddings: bool = False  # one matrix for input and output
    rotary_base: float = 1_000_000.0
    norm_epsilon: float = 1e-6
    max_positions: int = 40960  # longest sequence the exported directory declares
    init_std: float | None = 0.02  # of fresh matrices; None: 1 / sqrt(inputs), better for very small models

    def __post_init__(self) -> None:
        check_range(self, 1, MAX_SIZE, "hidden_size", "num_heads", "ffn_hidden_size", "vocab_size")
        check_range(self, 1, MAX_LAYERS, "num_layers")
        check_range(self, 1, 1 << 40, "max_positions")
        check_range(self, 1.0, 1e30, "rotary_base")
        check_range(self, 0.0, 1.0, "norm_epsilon")
        check_range(self, 0.0, 1e3, "init_std")


@dataclass(frozen=True, kw_only=True)
class GroupedQueryConfig(DecoderConfig):
    """A decoder whose query heads share key-value heads in groups."""

    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 1, MAX_SIZE, "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}. Change one of them."
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} is odd; rotary embedding turns pairs. Use an even size.")


@dataclass(frozen=True, kw_only=True)
class Qwen2LanguageConfig(GroupedQueryConfig):
    """The dense Qwen2 decoder of Qwen2.5-VL: biased queries, keys and values, rotary over three axes (M-RoPE)."""

    kind: Literal["qwen2"] = "qwen2"
    mrope_sections: tuple[int, int, int] = (16, 24, 24)  # rotary pairs that follow time, height and width
    # Where text continues after a video: behind the larger of height and width (transformers from 5.3), or behind the
    # largest position on all three axes (before)
    after_video: Literal["height_width", "all_axes"] = "height_width"
    max_positions: int = 128_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.mrope_sections) < 0:
            raise ModelError(f"mrope_sections={list(self.mrope_sections)} has a number below 0. Use 0 or more.")
        if 2 * sum(self.mrope_sections) != self.head_dim:
            raise ModelError(
                f"mrope_sections={self.mrope_sections} give {sum(self.mrope_sections)} pairs, but head_dim="
                f"{self.head_dim} has {self.head_dim // 2}. Change one of them."
            )


@dataclass(frozen=True, kw_only=True)
class Qwen3LanguageConfig(GroupedQueryConfig):
    """A dense Qwen3 decoder: queries and keys are normed, rotary over one axis."""

    kind: Literal["qwen3"] = "qwen3"


@dataclass(frozen=True, kw_only=True)
class Qwen3MoELanguageConfig(GroupedQueryConfig):
    """A Qwen3 decoder whose MLPs are experts behind a soft-max router."""

    kind: Literal["qwen3_moe"] = "qwen3_moe"
    num_experts: int
    experts_per_token: int
    expert_ffn_hidden_size: int
    normalize_router: bool = True  # the chosen experts' probabilities are scaled to sum to 1
    aux_loss_weight: float = 0.001  # of the loss that balances the experts' load

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 1, MAX_SIZE, "num_experts", "expert_ffn_hidden_size")
        check_range(self, 0.0, 1e6, "aux_loss_weight")
        check_experts(self.num_experts, self.experts_per_token)


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """Rotary frequencies stretched for longer sequences (YaRN, arXiv 2309.00071), as DeepSeek-V3 has them."""

    factor: float = 40.0
    original_max_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def __post_init__(self) -> None:
        check_range(self, 1.0, 1e6, "factor")
        check_range(self, 1, 1 << 40, "original_max_positions")
        check_range(self, 1e-6, 1e6, "beta_fast", "beta_slow")
        check_range(self, 0.0, 1e6, "mscale", "mscale_all_dim")


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3LanguageConfig(DecoderConfig):
    """A DeepSeek-V3 decoder: latent attention, dense layers first, then sigmoid-routed experts (arXiv 2412.19437)."""

    kind: Literal["deepseek_v3"] = "deepseek_v3"
    q_lora_rank: int
    kv_lora_rank: int
    nope_head_dim: int  # part of a head without rotary
    rope_head_dim: int  # part with; its key is shared by all heads
    value_head_dim: int
    num_dense_layers: int  # at the start; the rest have experts
    num_experts: int
    experts_per_token: int
    expert_ffn_hidden_size: int
    num_shared_experts: int = 1
    num_expert_groups: int = 8
    groups_per_token: int = 4
    routed_scale: float = 2.5  # factor of the routed experts' output
    bias_update_rate: float = 0.001  # of the router's balancing bias, per step
    num_mtp_layers: int = 1  # layers that predict one token further each
    mtp_loss_weight: float = 0.3
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
                f"num_experts={self.num_experts} in num_expert_groups={self.num_expert_groups}, of which "
                f"groups_per_token={self.groups_per_token}: groups must be equal and enough. Change one of them."
            )
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ModelError(
                f"num_dense_layers={self.num_dense_layers} of num_layers={self.num_layers}. Use 0 to {self.num_layers}."
            )
        if self.rope_head_dim % 2:
            raise ModelError(f"rope_head_dim={self.rope_head_dim} is odd; rotary embedding turns pairs. Change it.")


LanguageConfig = Qwen2LanguageConfig | Qwen3LanguageConfig | Qwen3MoELanguageConfig | DeepSeekV3LanguageConfig

FAMILIES: dict[str, type[LanguageConfig]] = {
    "qwen2": Qwen2LanguageConfig,
    "qwen3": Qwen3LanguageConfig,
    "qwen3_moe": Qwen3MoELanguageConfig,
    "deepseek_v3": DeepSeekV3LanguageConfig,
}


def check_experts(num_experts: int, experts_per_token: int) -> None:
    """Refuse a router that cannot choose that many experts."""
    if not 0 < experts_per_token <= num_experts:
        raise ModelError(f"experts_per_token={experts_per_token} of num_experts={num_experts}. Use 1 to {num_experts}.")


def check_range(config: object, low: float, high: float, *names: str) -> None:
    """Refuse fields of a configuration outside of [low, high]; None is always allowed, NaN never.

    Raises:
        ModelError: By the name of the field.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise ModelError(f"{name}={value} must be between {low} and {high}.")
