# SPDX-License-Identifier: Apache-2.0
"""Weight rules of the families with experts: Qwen3-MoE and DeepSeek-V3, under the names of their published directories.

Comes after rules.py, before names.py lists all families. Directories hold one matrix [out, in] for each expert, we hold
[experts, in, out]; the layers of multi-token prediction follow the last decoder layer (DeepSeek-V3: layer 61).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mindvl_model.errors import WeightError
from mindvl_model.language_config import DeepSeekV3LanguageConfig, Qwen3MoELanguageConfig
from mindvl_model.weights.rules import WeightRule, gated, grouped, same

PREFIX = "model.language_model."


def qwen3_moe_rules(config: Qwen3MoELanguageConfig) -> Iterator[WeightRule]:
    """Every parameter of a Qwen3-MoE decoder."""
    yield same("language.embedding.word_embeddings.weight", f"{PREFIX}embed_tokens.weight")
    for layer in range(config.num_layers):
        ours, theirs = f"language.decoder.layers.{layer}.", f"{PREFIX}layers.{layer}."
        yield from _norms(ours, theirs)
        yield grouped(config, ours + "self_attention.linear_qkv", theirs + "self_attn.", "weight")
        yield same(ours + "self_attention.q_layernorm.weight", theirs + "self_attn.q_norm.weight")
        yield same(ours + "self_attention.k_layernorm.weight", theirs + "self_attn.k_norm.weight")
        yield same(ours + "self_attention.linear_proj.weight", theirs + "self_attn.o_proj.weight")
        yield from _experts(ours + "mlp.", theirs + "mlp.", config.num_experts)
    yield same("language.decoder.final_layernorm.weight", f"{PREFIX}norm.weight")
    if not config.tie_embeddings:
        yield same("language.output_layer.weight", "lm_head.weight")


def deepseek_v3_rules(config: DeepSeekV3LanguageConfig) -> Iterator[WeightRule]:
    """Every parameter and routing bias of a DeepSeek-V3 decoder.

    Its directory repeats embedding and head in every layer of multi-token prediction; they are one parameter here.
    """
    extra = [f"{PREFIX}layers.{config.num_layers + depth}." for depth in range(config.num_mtp_layers)]
    yield _repeated(
        "language.embedding.word_embeddings.weight",
        (f"{PREFIX}embed_tokens.weight", *(theirs + "embed_tokens.weight" for theirs in extra)),
    )
    for layer in range(config.num_layers):
        ours, theirs = f"language.decoder.layers.{layer}.", f"{PREFIX}layers.{layer}."
        yield from _latent_layer(ours, theirs, config, dense=layer < config.num_dense_layers)
    yield same("language.decoder.final_layernorm.weight", f"{PREFIX}norm.weight")
    for depth, theirs in enumerate(extra):
        ours = f"language.mtp.layers.{depth}."
        for name in ("enorm", "hnorm", "eh_proj"):
            yield same(f"{ours}{name}.weight", f"{theirs}{name}.weight")
        yield from _latent_layer(ours + "transformer_layer.", theirs, config, dense=False)
        yield same(ours + "final_layernorm.weight", theirs + "shared_head.norm.weight")
    if not config.tie_embeddings:
        heads = ("lm_head.weight", *(theirs + "shared_head.head.weight" for theirs in extra))
        yield _repeated("language.output_layer.weight", heads)


def _norms(ours: str, theirs: str) -> Iterator[WeightRule]:
    yield same(ours + "input_layernorm.weight", theirs + "input_layernorm.weight")
    yield same(ours + "pre_mlp_layernorm.weight", theirs + "post_attention_layernorm.weight")


def _latent_layer(ours: str, theirs: str, config: DeepSeekV3LanguageConfig, *, dense: bool) -> Iterator[WeightRule]:
    yield from _norms(ours, theirs)
    attention = {
        "linear_q_down_proj": "q_a_proj",
        "q_layernorm": "q_a_layernorm",
        "linear_q_up_proj": "q_b_proj",
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
        "linear_proj": "o_proj",
    }
    for name, hf_name in attention.items():
        yield same(f"{ours}self_attention.{name}.weight", f"{theirs}self_attn.{hf_name}.weight")
    if dense:
        yield from _mlp(ours + "mlp.", theirs + "mlp.")
        return
    yield from _experts(ours + "mlp.", theirs + "mlp.", config.num_experts)
    yield same(ours + "mlp.router.expert_bias", theirs + "mlp.gate.e_score_correction_bias")
    if config.num_shared_experts:
        yield from _mlp(ours + "mlp.shared_experts.", theirs + "mlp.shared_experts.")


def _mlp(ours: str, theirs: str) -> Iterator[WeightRule]:
    yield gated(ours + "linear_fc1.weight", theirs + "gate_proj.weight", theirs + "up_proj.weight")
    yield same(ours + "linear_fc2.weight", theirs + "down_proj.weight")


def _experts(ours: str, theirs: str, num_experts: int) -> Iterator[WeightRule]:
    yield same(ours + "router.weight", theirs + "gate.weight")
    experts = [f"{theirs}experts.{expert}." for expert in range(num_experts)]
    gates_and_ups = tuple(expert + name for expert in experts for name in ("gate_proj.weight", "up_proj.weight"))
    yield WeightRule(
        ours + "experts.linear_fc1.weight",
        gates_and_ups,
        lambda tensors: torch.stack(
            [torch.cat(pair).T for pair in zip(tensors[::2], tensors[1::2], strict=True)]
        ),  # [E, H, 2F]
        lambda tensor: [half.contiguous() for expert in tensor for half in expert.T.chunk(2)],
    )
    yield WeightRule(
        ours + "experts.linear_fc2.weight",
        tuple(expert + "down_proj.weight" for expert in experts),
        lambda tensors: torch.stack([tensor.T for tensor in tensors]),  # [E, F, H]
        lambda tensor: [expert.T.contiguous() for expert in tensor],
    )


def _repeated(param_name: str, hf_names: tuple[str, ...]) -> WeightRule:
    """One parameter that the directory holds several times."""

    def join(tensors: list[Tensor]) -> Tensor:
        for name, tensor in zip(hf_names, tensors, strict=True):
            if tensor.shape != tensors[0].shape or (not tensor.is_meta and not torch.equal(tensor, tensors[0])):
                raise WeightError(f"{name} differs from {hf_names[0]}, but both are one parameter here")
        return tensors[0]

    # Copies, because a safetensors file refuses tensors that share memory.
    return WeightRule(param_name, hf_names, join, lambda tensor: [tensor, *(tensor.clone() for _ in hf_names[1:])])
