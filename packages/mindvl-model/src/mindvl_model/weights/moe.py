# SPDX-License-Identifier: Apache-2.0
"""Weight rules of the families with experts, Qwen3-MoE and DeepSeek-V3, with the names of the published directories.

names.py lists the rules of all families. Directories have one matrix [out, in] per expert, the parameters here are
[experts, in, out]. Multi-token prediction layers follow the last decoder layer (DeepSeek-V3: layer 61).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mindvl_model.errors import WeightError
from mindvl_model.language_config import DeepSeekV3LanguageConfig, Qwen3MoELanguageConfig
from mindvl_model.weights.rules import WeightRule, gated, grouped, same

HF_DECODER = "model.language_model."


def qwen3_moe_rules(config: Qwen3MoELanguageConfig) -> Iterator[WeightRule]:
    """Yield the rules of all parameters of a Qwen3-MoE decoder."""
    yield same("language.embedding.word_embeddings.weight", f"{HF_DECODER}embed_tokens.weight")
    for layer in range(config.num_layers):
        prefix, hf_prefix = f"language.decoder.layers.{layer}.", f"{HF_DECODER}layers.{layer}."
        yield from _norms(prefix, hf_prefix)
        yield grouped(config, prefix + "self_attention.linear_qkv", hf_prefix + "self_attn.", "weight")
        yield same(prefix + "self_attention.q_layernorm.weight", hf_prefix + "self_attn.q_norm.weight")
        yield same(prefix + "self_attention.k_layernorm.weight", hf_prefix + "self_attn.k_norm.weight")
        yield same(prefix + "self_attention.linear_proj.weight", hf_prefix + "self_attn.o_proj.weight")
        yield from _experts(prefix + "mlp.", hf_prefix + "mlp.", config.num_experts)
    yield same("language.decoder.final_layernorm.weight", f"{HF_DECODER}norm.weight")
    if not config.tie_embeddings:
        yield same("language.output_layer.weight", "lm_head.weight")


def deepseek_v3_rules(config: DeepSeekV3LanguageConfig) -> Iterator[WeightRule]:
    """Yield the rules of all parameters and routing biases of a DeepSeek-V3 decoder.

    Directories repeat embedding and output layer in every multi-token prediction layer; here each is one parameter.
    """
    extra = [f"{HF_DECODER}layers.{config.num_layers + depth}." for depth in range(config.num_mtp_layers)]
    yield _repeated(
        "language.embedding.word_embeddings.weight",
        (f"{HF_DECODER}embed_tokens.weight", *(hf_prefix + "embed_tokens.weight" for hf_prefix in extra)),
    )
    for layer in range(config.num_layers):
        prefix, hf_prefix = f"language.decoder.layers.{layer}.", f"{HF_DECODER}layers.{layer}."
        yield from _latent_layer(prefix, hf_prefix, config, dense=layer < config.num_dense_layers)
    yield same("language.decoder.final_layernorm.weight", f"{HF_DECODER}norm.weight")
    for depth, hf_prefix in enumerate(extra):
        prefix = f"language.mtp.layers.{depth}."
        for name in ("enorm", "hnorm", "eh_proj"):
            yield same(f"{prefix}{name}.weight", f"{hf_prefix}{name}.weight")
        yield from _latent_layer(prefix + "transformer_layer.", hf_prefix, config, dense=False)
        yield same(prefix + "final_layernorm.weight", hf_prefix + "shared_head.norm.weight")
    if not config.tie_embeddings:
        heads = ("lm_head.weight", *(hf_prefix + "shared_head.head.weight" for hf_prefix in extra))
        yield _repeated("language.output_layer.weight", heads)


def _norms(prefix: str, hf_prefix: str) -> Iterator[WeightRule]:
    yield same(prefix + "input_layernorm.weight", hf_prefix + "input_layernorm.weight")
    yield same(prefix + "pre_mlp_layernorm.weight", hf_prefix + "post_attention_layernorm.weight")


def _latent_layer(
    prefix: str, hf_prefix: str, config: DeepSeekV3LanguageConfig, *, dense: bool
) -> Iterator[WeightRule]:
    yield from _norms(prefix, hf_prefix)
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
        yield same(f"{prefix}self_attention.{name}.weight", f"{hf_prefix}self_attn.{hf_name}.weight")
    if dense:
        yield from _mlp(prefix + "mlp.", hf_prefix + "mlp.")
        return
    yield from _experts(prefix + "mlp.", hf_prefix + "mlp.", config.num_experts)
    yield same(prefix + "mlp.router.expert_bias", hf_prefix + "mlp.gate.e_score_correction_bias")
    if config.num_shared_experts:
        yield from _mlp(prefix + "mlp.shared_experts.", hf_prefix + "mlp.shared_experts.")


def _mlp(prefix: str, hf_prefix: str) -> Iterator[WeightRule]:
    yield gated(prefix + "linear_fc1.weight", hf_prefix + "gate_proj.weight", hf_prefix + "up_proj.weight")
    yield same(prefix + "linear_fc2.weight", hf_prefix + "down_proj.weight")


def _experts(prefix: str, hf_prefix: str, num_experts: int) -> Iterator[WeightRule]:
    yield same(prefix + "router.weight", hf_prefix + "gate.weight")
    experts = [f"{hf_prefix}experts.{expert}." for expert in range(num_experts)]
    gates_and_ups = tuple(expert + name for expert in experts for name in ("gate_proj.weight", "up_proj.weight"))
    yield WeightRule(
        prefix + "experts.linear_fc1.weight",
        gates_and_ups,
        lambda tensors: torch.stack(
            [torch.cat(pair).T for pair in zip(tensors[::2], tensors[1::2], strict=True)]
        ),  # [E, H, 2F]
        lambda tensor: [half.contiguous() for expert in tensor for half in expert.T.chunk(2)],
    )
    yield WeightRule(
        prefix + "experts.linear_fc2.weight",
        tuple(expert + "down_proj.weight" for expert in experts),
        lambda tensors: torch.stack([tensor.T for tensor in tensors]),  # [E, F, H]
        lambda tensor: [expert.T.contiguous() for expert in tensor],
    )


def _repeated(param_name: str, hf_names: tuple[str, ...]) -> WeightRule:
    """One parameter that the directory contains several times."""

    def join(tensors: list[Tensor]) -> Tensor:
        for name, tensor in zip(hf_names, tensors, strict=True):
            if tensor.shape != tensors[0].shape or (not tensor.is_meta and not torch.equal(tensor, tensors[0])):
                raise WeightError(f"{name}: must equal {hf_names[0]}, because both are copies of one parameter.")
        return tensors[0]

    # Cloned, because safetensors does not save tensors that share memory.
    return WeightRule(param_name, hf_names, join, lambda tensor: [tensor, *(tensor.clone() for _ in hf_names[1:])])
