# SPDX-License-Identifier: Apache-2.0
"""The decoders of Qwen3-VL: Qwen3, dense and with experts, with rotary embedding over three alternating axes (M-RoPE)."""

from dataclasses import dataclass
from typing import Any, Literal

from mindvl_model.errors import ModelError, WeightError
from mindvl_model.families.keys import (
    check_no_scaling,
    decoder_sizes,
    grouped_query,
    number_or,
    rotary_keys,
    write_decoder,
)
from mindvl_model.families.preset import GroupedQueryPreset
from mindvl_model.hf.config_keys import MAX_EXPERTS, Keys
from mindvl_model.language_config import ExpertsConfig, GroupedQueryAttention, LanguageConfig, RopeConfig

SECTIONS = (24, 20, 20)  # default of transformers


@dataclass(frozen=True, kw_only=True)
class Qwen3VLPreset(GroupedQueryPreset):
    """The dense decoder of Qwen3-VL: normalized queries and keys, rotary over three alternating axes (M-RoPE)."""

    # Family of the language model; selects the fields of this section.
    kind: Literal["qwen3_vl_text"] = "qwen3_vl_text"
    mrope_sections: tuple[int, int, int] = SECTIONS  # Rotary frequency pairs per axis: time, height, width.
    rotary_base: float = 5_000_000.0
    max_positions: int = 262_144

    def decoder(self) -> LanguageConfig:
        """Return the properties of the decoder."""
        return self.with_properties(
            attention=self.part(GroupedQueryAttention, qk_norm=True),
            rope=self.part(RopeConfig, sections_interleaved=True),
        )


@dataclass(frozen=True, kw_only=True)
class Qwen3VLMoEPreset(GroupedQueryPreset):
    """The decoder of Qwen3-VL with experts and a softmax router in place of the MLPs."""

    # Family of the language model; selects the fields of this section.
    kind: Literal["qwen3_vl_moe_text"] = "qwen3_vl_moe_text"
    num_experts: int  # experts of a layer
    experts_per_token: int  # experts that each token is routed to
    expert_ffn_hidden_size: int  # width inside the MLP of an expert
    aux_loss_weight: float = 0.001  # weight of the auxiliary load-balancing loss
    mrope_sections: tuple[int, int, int] = SECTIONS  # Rotary frequency pairs per axis: time, height, width.
    rotary_base: float = 5_000_000.0
    max_positions: int = 262_144

    def decoder(self) -> LanguageConfig:
        """Return the properties of the decoder."""
        return self.with_properties(
            attention=self.part(GroupedQueryAttention, qk_norm=True),
            rope=self.part(RopeConfig, sections_interleaved=True),
            experts=self.part(ExpertsConfig, joined=True),
        )


def read(family: str, text: Keys, root: Keys) -> LanguageConfig:
    return _read(family, text, root, text.number("head_dim", 128), None)


def read_moe(family: str, text: Keys, root: Keys) -> LanguageConfig:
    # Every layer must have experts; these keys would make some layers dense.
    text.only("decoder_sparse_step", 1)
    text.only("mlp_only_layers", [], None)
    text.flag("norm_topk_prob", True)  # without effect in transformers, which always normalizes
    # Published directories have num_experts, transformers 5 writes num_local_experts.
    count = text.number("num_experts", text.take("num_local_experts", 60), most=MAX_EXPERTS)
    experts = ExpertsConfig(
        num_experts=count,
        experts_per_token=text.number("num_experts_per_tok", 4),
        expert_ffn_hidden_size=text.number("moe_intermediate_size", 1408),
        joined=True,
        aux_loss_weight=text.number("router_aux_loss_coef", 0.001, whole=False, least=0),
    )
    head_dim = text.take("head_dim", None) or text.number("hidden_size") // text.number("num_attention_heads")
    text.values = text.values | {"head_dim": head_dim}  # null means this default
    head_dim = text.number("head_dim")
    return _read(family, text, root, head_dim, experts)


def write(language: LanguageConfig) -> dict[str, Any]:
    attention, rope = grouped_query(language), language.rope
    if rope.mrope_sections is None or not rope.sections_interleaved:
        raise ModelError(
            "language.rope.sections_interleaved: a Qwen3-VL model can only be exported with three alternating axes. Train "
            "with sections_interleaved: true."
        )
    keys = write_decoder(language) | {
        "num_key_value_heads": attention.num_kv_heads,
        "model_type": language.family,
        "head_dim": attention.head_dim,
        "attention_bias": attention.qkv_bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rope_theta": rope.rotary_base,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": list(rope.mrope_sections),
        },
    }
    experts = language.experts
    if experts is None:
        return keys
    if not experts.normalize_router:
        raise ModelError(
            "language.experts.normalize_router: a Qwen3-VL model can only be exported with true, which transformers uses, "
            "got false. Train with this value."
        )
    return keys | {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.expert_ffn_hidden_size,
        "norm_topk_prob": True,
        "router_aux_loss_coef": experts.aux_loss_weight,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _read(family: str, text: Keys, root: Keys, head_dim: int, experts: ExpertsConfig | None) -> LanguageConfig:
    sizes = decoder_sizes(text, root) | {"tie_embeddings": root.flag("tie_word_embeddings", False)}
    theta, kind, more = rotary_keys(text, 500_000.0)
    given = Keys(dict(more), f"{text.where}: rope_scaling")
    given.only("mrope_interleaved", True, None)
    sections = given.numbers("mrope_section", SECTIONS, count=3)
    check_no_scaling(text, "default" if kind == "mrope" else kind, more.keys() - {"mrope_section", "mrope_interleaved"})
    bias = text.flag("attention_bias", False)
    if head_dim % 2:
        raise WeightError(
            f"{text.where}: head_dim={head_dim} is not supported; it must be even. Use another directory."
        )
    return LanguageConfig(
        family=family,
        **sizes,
        attention=GroupedQueryAttention(
            num_kv_heads=number_or(
                text, "num_key_value_heads", sizes["num_heads"], missing=32 if experts is None else 16
            ),
            head_dim=head_dim,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
        ),
        rope=RopeConfig(
            rotary_base=theta, mrope_sections=_effective(sections, head_dim // 2), sections_interleaved=True
        ),
        experts=experts,
    )


def _effective(sections: tuple[int, int, int], num_pairs: int) -> tuple[int, int, int]:
    """The sections that take effect: transformers counts height and width, and gives all other pairs to time."""
    height, width = (
        sum(pair % 3 == axis and pair < 3 * sections[axis] for pair in range(num_pairs)) for axis in (1, 2)
    )
    return num_pairs - height - width, height, width
