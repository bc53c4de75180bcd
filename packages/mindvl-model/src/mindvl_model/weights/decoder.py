# SPDX-License-Identifier: Apache-2.0
"""Weight rules of a decoder, functions of its properties, with the names of the published directories.

names.py adds the rules of the other parts. All families name the parts alike. Directories have one matrix [out, in] per
expert, the parameters here are [experts, in, out]. Multi-token prediction layers follow the last decoder layer.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mindvl_model.errors import WeightError
from mindvl_model.language_config import ExpertsConfig, GroupedQueryAttention, LanguageConfig
from mindvl_model.weights.rules import WeightRule, gated, same

HF_DECODER = "model.language_model."
_QUERY = {"linear_q_proj": "q_proj"}
_LATENT_QUERY = {"linear_q_down_proj": "q_a_proj", "q_layernorm": "q_a_layernorm", "linear_q_up_proj": "q_b_proj"}
_LATENT = {
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}


def decoder_rules(config: LanguageConfig) -> Iterator[WeightRule]:
    """Yield the rules of all parameters and routing biases of a decoder.

    Directories repeat embedding and output layer in every multi-token prediction layer; here each is one parameter.
    """
    extra = [f"{HF_DECODER}layers.{config.num_layers + depth}." for depth in range(config.num_mtp_layers)]
    yield _repeated(
        "language.embedding.word_embeddings.weight",
        (f"{HF_DECODER}embed_tokens.weight", *(hf_prefix + "embed_tokens.weight" for hf_prefix in extra)),
    )
    for layer in range(config.num_layers):
        prefix, hf_prefix = f"language.decoder.layers.{layer}.", f"{HF_DECODER}layers.{layer}."
        yield from _layer(prefix, hf_prefix, config, dense=layer < config.num_dense_layers)
    yield same("language.decoder.final_layernorm.weight", f"{HF_DECODER}norm.weight")
    for depth, hf_prefix in enumerate(extra):
        prefix = f"language.mtp.layers.{depth}."
        for name in ("enorm", "hnorm", "eh_proj"):
            yield same(f"{prefix}{name}.weight", f"{hf_prefix}{name}.weight")
        yield from _layer(prefix + "transformer_layer.", hf_prefix, config, dense=config.experts is None)
        yield same(prefix + "final_layernorm.weight", hf_prefix + "shared_head.norm.weight")
    if not config.tie_embeddings:
        heads = ("lm_head.weight", *(hf_prefix + "shared_head.head.weight" for hf_prefix in extra))
        yield _repeated("language.output_layer.weight", heads)


def _layer(prefix: str, hf_prefix: str, config: LanguageConfig, *, dense: bool) -> Iterator[WeightRule]:
    attention = config.attention
    yield same(prefix + "input_layernorm.weight", hf_prefix + "input_layernorm.weight")
    yield same(prefix + "pre_mlp_layernorm.weight", hf_prefix + "post_attention_layernorm.weight")
    if attention.kind == "grouped_query":
        yield from _grouped_query(prefix + "self_attention.", hf_prefix + "self_attn.", attention, config.num_heads)
    else:
        query = _QUERY if attention.q_lora_rank is None else _LATENT_QUERY
        for name, hf_name in (query | _LATENT).items():
            yield same(f"{prefix}self_attention.{name}.weight", f"{hf_prefix}self_attn.{hf_name}.weight")
    if dense or config.experts is None:
        yield from _mlp(prefix + "mlp.", hf_prefix + "mlp.", bias=config.mlp_bias)
    else:
        yield from _experts(prefix + "mlp.", hf_prefix + "mlp.", config.experts, config.hidden_size)


def _grouped_query(
    prefix: str, hf_prefix: str, attention: GroupedQueryAttention, num_heads: int
) -> Iterator[WeightRule]:
    for kind in ("weight", "bias") if attention.qkv_bias else ("weight",):
        yield _joined_heads(f"{prefix}linear_qkv.{kind}", hf_prefix, kind, attention, num_heads)
    if attention.qk_norm:
        yield same(prefix + "q_layernorm.weight", hf_prefix + "q_norm.weight")
        yield same(prefix + "k_layernorm.weight", hf_prefix + "k_norm.weight")
    for kind in ("weight", "bias") if attention.output_bias else ("weight",):
        yield same(f"{prefix}linear_proj.{kind}", f"{hf_prefix}o_proj.{kind}")


def _joined_heads(
    param_name: str, hf_prefix: str, kind: str, attention: GroupedQueryAttention, num_heads: int
) -> WeightRule:
    """megatron-core stores the queries of a group with its key and value."""
    size, queries = attention.head_dim, num_heads // attention.num_kv_heads

    def join(tensors: list[Tensor]) -> Tensor:
        width = tensors[0].shape[1:]
        parts = [
            tensor.reshape(-1, heads, size, *width) for heads, tensor in zip((queries, 1, 1), tensors, strict=True)
        ]
        return torch.cat(parts, dim=1).reshape(-1, *width)

    def split(tensor: Tensor) -> list[Tensor]:
        width = tensor.shape[1:]
        parts = tensor.reshape(-1, queries + 2, size, *width).split((queries, 1, 1), dim=1)
        return [part.reshape(-1, *width).contiguous() for part in parts]

    return WeightRule(param_name, tuple(f"{hf_prefix}{name}_proj.{kind}" for name in "qkv"), join, split)


def _mlp(prefix: str, hf_prefix: str, *, bias: bool = False) -> Iterator[WeightRule]:
    for kind in ("weight", "bias") if bias else ("weight",):
        yield gated(f"{prefix}linear_fc1.{kind}", f"{hf_prefix}gate_proj.{kind}", f"{hf_prefix}up_proj.{kind}")
        yield same(f"{prefix}linear_fc2.{kind}", f"{hf_prefix}down_proj.{kind}")


def _experts(prefix: str, hf_prefix: str, config: ExpertsConfig, hidden_size: int) -> Iterator[WeightRule]:
    yield same(prefix + "router.weight", hf_prefix + "gate.weight")
    if config.joined:
        wide = 2 * config.expert_ffn_hidden_size
        yield _all_experts(prefix + "experts.linear_fc1.weight", hf_prefix + "experts.gate_up_proj", hidden_size, wide)
        yield _all_experts(
            prefix + "experts.linear_fc2.weight",
            hf_prefix + "experts.down_proj",
            config.expert_ffn_hidden_size,
            hidden_size,
        )
    else:
        yield from _single_experts(prefix, hf_prefix, config)
    if config.router == "sigmoid":
        yield same(prefix + "router.expert_bias", hf_prefix + "gate.e_score_correction_bias")
    if config.num_shared_experts:
        yield from _mlp(prefix + "shared_experts.", hf_prefix + "shared_experts.")


def _all_experts(param_name: str, hf_name: str, inputs: int, outputs: int) -> WeightRule:
    """One tensor for all experts: [E, in, out] as published, or [E, out, in] as transformers 5 saves a new model.

    Like transformers, a tensor that has both shapes is read and written as the latter.
    """

    def join(tensors: list[Tensor]) -> Tensor:
        tensor = tensors[0]
        return tensor.transpose(1, 2).contiguous() if tensor.shape[1:] == (outputs, inputs) else tensor

    def split(tensor: Tensor) -> list[Tensor]:
        return [tensor.transpose(1, 2).contiguous() if inputs == outputs else tensor]

    return WeightRule(param_name, (hf_name,), join, split)


def _single_experts(prefix: str, hf_prefix: str, config: ExpertsConfig) -> Iterator[WeightRule]:
    experts = [f"{hf_prefix}experts.{expert}." for expert in range(config.num_experts)]
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
