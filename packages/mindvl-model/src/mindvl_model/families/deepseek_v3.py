# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 decoders: latent attention, dense layers first, then sigmoid-routed experts (arXiv 2412.19437)."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mindvl_model.errors import ModelError
from mindvl_model.families.keys import decoder_sizes, read_rope, write_decoder, write_rope
from mindvl_model.families.preset import Preset
from mindvl_model.hf.config_keys import MAX_EXPERTS, MAX_LAYERS, Keys
from mindvl_model.language_config import ExpertsConfig, LanguageConfig, LatentAttention, RopeConfig, YarnConfig


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3Preset(Preset):
    """A DeepSeek-V3 decoder: latent attention, dense layers first, then sigmoid-routed experts (arXiv 2412.19437)."""

    kind: Literal["deepseek_v3"] = "deepseek_v3"  # Family of the language model; selects the fields of this section.
    q_lora_rank: int | None  # Size of the latent of queries; null: queries are projected without a latent.
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

    def decoder(self) -> LanguageConfig:
        """Return the properties of the decoder."""
        return self.with_properties(
            attention=self.part(LatentAttention),
            rope=self.part(RopeConfig, scaling=self.yarn, interleaved_pairs=True),
            experts=self.part(ExpertsConfig, router="sigmoid"),
        )


def read(family: str, text: Keys, root: Keys) -> LanguageConfig:
    """Read a decoder with latent attention and sigmoid-routed experts."""
    sizes = decoder_sizes(text, root)
    text.only("num_key_value_heads", sizes["num_heads"], None)
    for name, value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid"), ("norm_topk_prob", True)):
        text.only(name, value)
    text.only("moe_layer_freq", 1)
    text.only("rope_interleave", True)
    rotary = read_rope(text, 10_000.0, sizes["max_positions"])
    nope, rope = text.number("qk_nope_head_dim"), text.number("qk_rope_head_dim")
    text.only("qk_head_dim", nope + rope)  # written by transformers 5, derived from other keys, as is head_dim
    text.only("head_dim", rope)
    return LanguageConfig(
        family=family,
        **sizes,
        attention=LatentAttention(
            # null is not a missing key, for which transformers has a default
            q_lora_rank=None if text.take("q_lora_rank", 1536) is None else text.number("q_lora_rank", 1536),
            kv_lora_rank=text.number("kv_lora_rank"),
            nope_head_dim=nope,
            rope_head_dim=rope,
            value_head_dim=text.number("v_head_dim"),
        ),
        rope=replace(rotary, interleaved_pairs=True),
        experts=ExpertsConfig(
            num_dense_layers=text.number("first_k_dense_replace", least=0, most=MAX_LAYERS),
            num_experts=text.number("n_routed_experts", most=MAX_EXPERTS),
            experts_per_token=text.number("num_experts_per_tok"),
            expert_ffn_hidden_size=text.number("moe_intermediate_size"),
            num_shared_experts=text.number("n_shared_experts"),
            router="sigmoid",
            num_expert_groups=text.number("n_group"),
            groups_per_token=text.number("topk_group"),
            routed_scale=text.number("routed_scaling_factor", whole=False),
            bias_update_rate=DeepSeekV3Preset.bias_update_rate,
        ),
        num_mtp_layers=text.number(
            "num_nextn_predict_layers", text.take("num_mtp_layers", 0), least=0, most=MAX_LAYERS
        ),
    )


def write(language: LanguageConfig) -> dict[str, Any]:
    """Return the keys of a decoder with latent attention and sigmoid-routed experts."""
    attention, experts = language.attention, language.experts
    assert attention.kind == "latent"
    assert experts is not None
    for name, used, value in (
        ("attention.latent_norm_epsilon", attention.latent_norm_epsilon, LatentAttention.latent_norm_epsilon),
        ("num_shared_experts", experts.num_shared_experts, max(experts.num_shared_experts, 1)),
    ):
        if used != value:
            raise ModelError(
                f"language.{name}: a DeepSeek-V3 model can only be exported with {value}, which transformers uses, got "
                f"{used}. Train with this value."
            )
    return write_decoder(language) | {
        "model_type": language.family,
        "num_key_value_heads": language.num_heads,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.nope_head_dim,
        "qk_rope_head_dim": attention.rope_head_dim,
        "v_head_dim": attention.value_head_dim,
        "first_k_dense_replace": experts.num_dense_layers,
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.expert_ffn_hidden_size,
        "n_shared_experts": experts.num_shared_experts,
        "n_group": experts.num_expert_groups,
        "topk_group": experts.groups_per_token,
        "routed_scaling_factor": experts.routed_scale,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": language.num_mtp_layers,
        "rope_interleave": True,
        "rope_parameters": write_rope(language.rope),
    }
