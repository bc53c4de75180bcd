# SPDX-License-Identifier: Apache-2.0
"""dots1 decoders (arXiv 2506.05767): normalized queries and keys, dense layers first, then sigmoid-routed experts."""

from dataclasses import dataclass
from typing import Any, Literal

from mindvl_model.errors import ModelError
from mindvl_model.families import qwen3
from mindvl_model.families.preset import GroupedQueryPreset
from mindvl_model.hf.config_keys import MAX_EXPERTS, MAX_LAYERS, Keys
from mindvl_model.language_config import ExpertsConfig, GroupedQueryAttention, LanguageConfig, RopeConfig


@dataclass(frozen=True, kw_only=True)
class Dots1Preset(GroupedQueryPreset):
    """A dots1 decoder; the defaults are those of dots.llm1."""

    kind: Literal["dots1"] = "dots1"  # Family of the language model; selects the fields of this section.
    num_dense_layers: int = 1  # Leading layers with a dense MLP; all later layers have experts.
    num_experts: int  # routed experts of a layer
    experts_per_token: int  # experts that each token is routed to
    expert_ffn_hidden_size: int  # width inside the MLP of an expert
    num_shared_experts: int = 2  # experts that every token uses
    num_expert_groups: int = 1  # groups of experts; a token uses experts of a few groups only
    groups_per_token: int = 1  # groups that a token may use
    # Scaling factor of the output of the routed experts (routed_scaling_factor in transformers).
    routed_scale: float = 2.5
    bias_update_rate: float = 0.001  # change of the router's load-balancing bias per optimizer step
    rotary_base: float = 10_000_000.0
    norm_epsilon: float = 1e-5
    max_positions: int = 32_768

    def decoder(self) -> LanguageConfig:
        """Return the properties of the decoder."""
        return self.with_properties(
            attention=self.part(GroupedQueryAttention, qk_norm=True),
            rope=self.part(RopeConfig),
            experts=self.part(ExpertsConfig, router="sigmoid"),
        )


def read(family: str, text: Keys, root: Keys) -> LanguageConfig:
    """Read a decoder with normalized queries and keys, and sigmoid-routed experts after the dense layers.

    Layers from max_window_layers on have a window unless layer_types, which is checked with the remaining keys, lists
    the layers.
    """
    window, first = text.take("sliding_window", 4096), text.take("max_window_layers", 62)
    layers = text.number("num_hidden_layers", most=MAX_LAYERS)
    if text.values.get("layer_types") is None and not (isinstance(first, int) and first >= layers):
        text.check_window(window)
    text.only("moe_layer_freq", 1)
    text.only("scoring_func", "sigmoid", "noaux_tc")  # dots.llm1 has the latter, which transformers does not read
    if not text.flag("norm_topk_prob", False):
        raise text.unsupported("norm_topk_prob", text.take("norm_topk_prob", False), "true")
    experts = ExpertsConfig(
        num_dense_layers=text.number("first_k_dense_replace", 0, least=0, most=MAX_LAYERS),
        # Published directories have n_routed_experts, transformers 5 accepts num_local_experts too.
        num_experts=text.number("n_routed_experts", text.take("num_local_experts", None), most=MAX_EXPERTS),
        experts_per_token=text.number("num_experts_per_tok"),
        expert_ffn_hidden_size=text.number("moe_intermediate_size"),
        num_shared_experts=text.number("n_shared_experts"),
        router="sigmoid",
        num_expert_groups=text.number("n_group", 1),
        groups_per_token=text.number("topk_group", 1),
        routed_scale=text.number("routed_scaling_factor", 1.0, whole=False),
        bias_update_rate=Dots1Preset.bias_update_rate,
    )
    return qwen3.read_normed(family, text, root, num_kv_heads=32, experts=experts)


def write(language: LanguageConfig) -> dict[str, Any]:
    """Return the keys of a decoder with normalized queries and keys, and sigmoid-routed experts."""
    experts = language.experts
    assert experts is not None
    if experts.num_shared_experts == 0:
        raise ModelError(
            "language.num_shared_experts: a dots1 model can only be exported with shared experts, got 0. "
            "Train with num_shared_experts >= 1."
        )
    return qwen3.write(language) | {
        "sliding_window": None,
        "first_k_dense_replace": experts.num_dense_layers,
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.expert_ffn_hidden_size,
        "n_shared_experts": experts.num_shared_experts,
        "n_group": experts.num_expert_groups,
        "topk_group": experts.groups_per_token,
        "routed_scaling_factor": experts.routed_scale,
        "norm_topk_prob": True,
    }
