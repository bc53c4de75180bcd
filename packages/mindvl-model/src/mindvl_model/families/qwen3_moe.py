# SPDX-License-Identifier: Apache-2.0
"""Qwen3 decoders with experts and a softmax router in place of the MLPs."""

from dataclasses import dataclass
from typing import Any, Literal

from mindvl_model.families import qwen3
from mindvl_model.families.preset import GroupedQueryPreset
from mindvl_model.hf.config_keys import MAX_EXPERTS, Keys
from mindvl_model.language_config import ExpertsConfig, GroupedQueryAttention, LanguageConfig, RopeConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEPreset(GroupedQueryPreset):
    """A Qwen3 decoder with experts and a softmax router in place of the MLPs."""

    kind: Literal["qwen3_moe"] = "qwen3_moe"  # Family of the language model; selects the fields of this section.
    num_experts: int  # experts of a layer
    experts_per_token: int  # experts that each token is routed to
    expert_ffn_hidden_size: int  # width inside the MLP of an expert
    normalize_router: bool = True  # scale the probabilities of the selected experts to sum to 1
    aux_loss_weight: float = 0.001  # weight of the auxiliary load-balancing loss

    def decoder(self) -> LanguageConfig:
        """Return the properties of the decoder."""
        return self.with_properties(
            attention=self.part(GroupedQueryAttention, qk_norm=True),
            rope=self.part(RopeConfig),
            experts=self.part(ExpertsConfig),
        )


def read(family: str, text: Keys, root: Keys) -> LanguageConfig:
    """Read a decoder with normalized queries and keys, and experts in every layer."""
    if text.flag("use_sliding_window", False):
        text.check_window(text.take("sliding_window", 4096))
    # Every layer must have experts; these keys would make some layers dense.
    text.only("decoder_sparse_step", 1)
    text.only("mlp_only_layers", [], None)
    # Published directories have num_experts, transformers 5 writes num_local_experts.
    count = text.number("num_experts", text.take("num_local_experts", None), most=MAX_EXPERTS)
    experts = ExpertsConfig(
        num_experts=count,
        experts_per_token=text.number("num_experts_per_tok"),
        expert_ffn_hidden_size=text.number("moe_intermediate_size"),
        normalize_router=text.flag("norm_topk_prob", False),
        aux_loss_weight=text.number("router_aux_loss_coef", 0.001, whole=False, least=0),
    )
    return qwen3.read_normed(family, text, root, num_kv_heads=4, experts=experts)


def write(language: LanguageConfig) -> dict[str, Any]:
    """Return the keys of a decoder with normalized queries and keys, and experts in every layer."""
    experts = language.experts
    assert experts is not None
    return qwen3.write(language) | {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.expert_ffn_hidden_size,
        "norm_topk_prob": experts.normalize_router,
        "router_aux_loss_coef": experts.aux_loss_weight,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
