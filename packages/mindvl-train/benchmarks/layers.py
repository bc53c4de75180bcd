# SPDX-License-Identifier: Apache-2.0
"""Operators, launches and bytes of one layer, forward and backward: ours, transformers', and minimal hand-written code.

Used by step.py for its first table; run alone, it prints the operators of every layer. Layers have their full size and
tensors are fake, so the count needs no device and takes seconds. What it cannot show is how much of its bandwidth a kernel
reaches.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "mindvl-data" / "benchmarks"))

from figures import Figure
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mindvl_ops import Segments, rms_norm, rotary_tables, use_backend
from mindvl_ops.torch_backend.padded import padded_index
from mindvl_ops.traffic import TrafficCounter

TOKENS = 8192
EPSILON = 1e-6
GOAL_GB = 6.0  # outside matmuls and attention, for the layer of Qwen3-8B


class Sizes(NamedTuple):
    """One dense layer."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    width: int  # of a head
    ffn: int
    is_vision: bool  # biases, full attention and no norms of heads


QWEN3_8B = Sizes("Qwen3-8B", 4096, 32, 8, 128, 12288, False)
VISION = Sizes("vision encoder", 1280, 16, 16, 80, 3420, True)

SEGMENTS = Segments([TOKENS])
# The plan of the CPU, made before tensors are fake. On CUDA the variable-length kernel needs none and moves the same bytes.
SEGMENTS.derived(("padded", torch.device("cpu")), lambda: padded_index(SEGMENTS, torch.device("cpu")))

Layer = Callable[[Tensor], Tensor]


def layer_figures() -> list[Figure]:
    """One figure for each layer and implementation."""
    figures = []
    for sizes, counters in counted().items():
        for name, counter in counters.items():
            outside, matmuls = counter.total("other"), counter.total("matmul")
            is_ours = name == "mindvl on CUDA"
            figures.append(
                Figure(
                    name=f"{sizes.name} layer: {name}",
                    value=outside.bytes / 1e9,
                    unit="GB",
                    at_most=GOAL_GB if is_ours and sizes is QWEN3_8B else None,
                    rival="transformers" if is_ours else "",
                    rival_value=counters["transformers"].total("other").bytes / 1e9 if is_ours else None,
                    note=f"{TOKENS:,} tokens, outside matmuls and attention, {outside.launches} launches; "
                    f"{matmuls.launches} matmuls, {matmuls.flops / 1e12:.2f} TFLOP",
                )
            )
    return figures


def counted() -> dict[Sizes, dict[str, TrafficCounter]]:
    """The traffic of every layer, by implementation."""
    from mindvl_model import set_up_device

    set_up_device("cpu")
    from mindvl_model.megatron.process import single_process

    with single_process():
        return {sizes: {name: count(make, sizes) for name, make in CONTENDERS.items()} for sizes in (QWEN3_8B, VISION)}


def count(make: Callable[[Sizes], Layer], sizes: Sizes) -> TrafficCounter:
    """The traffic of one layer, forward and backward, on TOKENS tokens in bfloat16."""
    with FakeTensorMode(), use_backend("triton", "rms_norm"):
        layer = make(sizes)
        x = torch.empty(TOKENS, sizes.hidden, dtype=torch.bfloat16, requires_grad=True)
        grad = torch.empty_like(x)
        with TrafficCounter() as counter:
            layer(x).backward(grad)
    return counter


def by_operator(counter: TrafficCounter) -> str:
    """The operators of one layer as a table, most bytes first."""
    rows = sorted(counter.operators.values(), key=lambda row: -row.bytes)
    return "\n".join(f"{row.operator:<48} {row.kind:<10}{row.launches:>4} {row.bytes / 1e9:8.3f} GB" for row in rows)


def _mindvl(backend: Any, sizes: Sizes) -> Layer:
    """Our layer, as the model builds it, with the operators of a backend."""
    from megatron.core.transformer.spec_utils import build_module

    from mindvl_model.megatron.blocks import PackedSequence, transformer_config
    from mindvl_model.megatron.spec import layer_spec
    from mindvl_model.parallel_config import BuildConfig

    config = transformer_config(
        BuildConfig(dtype=torch.bfloat16),
        num_layers=1,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        kv_channels=sizes.width,
        ffn_hidden_size=sizes.ffn,
        layernorm_epsilon=EPSILON,
        add_bias_linear=sizes.is_vision,
        qk_layernorm=not sizes.is_vision,
    )
    spec = layer_spec(causal=not sizes.is_vision, query_key_norm=not sizes.is_vision)
    layer = build_module(spec, config=config, layer_number=1)
    cos, sin = rotary_tables(torch.arange(TOKENS), sizes.width, 1e6)
    pack = PackedSequence(segments=SEGMENTS, cos=cos, sin=sin)

    def run(x: Tensor) -> Tensor:
        with use_backend(backend):
            output: Tensor = layer(x.unsqueeze(1), None, packed_seq_params=pack)[0].squeeze(1)
        return output

    return run


def _transformers(sizes: Sizes) -> Layer:
    """The layer of transformers, with its fused attention."""
    from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl, modeling_qwen2_5_vl
    from transformers.models.qwen3 import configuration_qwen3, modeling_qwen3

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        if sizes.is_vision:
            vision = configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
                hidden_size=sizes.hidden, intermediate_size=sizes.ffn, num_heads=sizes.heads
            )
            vision._attn_implementation = "sdpa"
            block = modeling_qwen2_5_vl.Qwen2_5_VLVisionBlock(vision)
        else:
            config = configuration_qwen3.Qwen3Config(
                hidden_size=sizes.hidden, intermediate_size=sizes.ffn, num_attention_heads=sizes.heads,
                num_key_value_heads=sizes.kv_heads, head_dim=sizes.width,
            )  # fmt: skip
            config._attn_implementation = "sdpa"
            block = modeling_qwen3.Qwen3DecoderLayer(config, 0)
    finally:
        torch.set_default_dtype(before)
    cos, sin = rotary_tables(torch.arange(TOKENS), sizes.width, 1e6)

    def run(x: Tensor) -> Tensor:
        if sizes.is_vision:
            lengths = np.array([0, TOKENS])  # its values are read on the host, which a fake tensor does not have
            output: Tensor = block(x, cu_seqlens=lengths, position_embeddings=(cos, sin))
            return output
        rotary = (cos.to(x.dtype)[None], sin.to(x.dtype)[None])
        output = block(x[None], attention_mask=None, position_embeddings=rotary)
        return output[0]

    return run


def _minimal(sizes: Sizes) -> Layer:
    """PyTorch's functions in the fewest lines, with its fused kernels of RMSNorm and attention."""

    def parameter(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)

    heads, groups, width = sizes.heads, sizes.kv_heads, sizes.width
    shapes = [((heads + 2 * groups) * width, sizes.hidden), (sizes.hidden, heads * width),
              (2 * sizes.ffn, sizes.hidden), (sizes.hidden, sizes.ffn)]  # fmt: skip
    qkv_weight, out_weight, up_weight, down_weight = (parameter(*shape) for shape in shapes)
    biases = [parameter(shape[0]) if sizes.is_vision else None for shape in shapes]
    first_norm, second_norm, query_norm, key_norm = (parameter(n) for n in (sizes.hidden, sizes.hidden, width, width))
    cos, sin = (table.bfloat16()[:, None] for table in rotary_tables(torch.arange(TOKENS), width, 1e6))

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def run(x: Tensor) -> Tensor:
        qkv = F.linear(rms_norm(x, first_norm, EPSILON), qkv_weight, biases[0]).view(TOKENS, -1, width)
        query, key, value = qkv.split((heads, groups, groups), dim=1)
        if not sizes.is_vision:
            query, key = rms_norm(query, query_norm, EPSILON), rms_norm(key, key_norm, EPSILON)
        query, key, value = (y.transpose(0, 1)[None] for y in (rotated(query), rotated(key), value))
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=not sizes.is_vision, enable_gqa=heads != groups
        )
        x = x + F.linear(attended[0].transpose(0, 1).reshape(TOKENS, -1), out_weight, biases[1])
        gate, up = F.linear(rms_norm(x, second_norm, EPSILON), up_weight, biases[2]).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, down_weight, biases[3])

    return run


CONTENDERS: dict[str, Callable[[Sizes], Layer]] = {
    "mindvl on CUDA": partial(_mindvl, "triton"),
    "mindvl on a CPU": partial(_mindvl, "torch"),
    "minimal eager code": _minimal,
    "transformers": _transformers,
}


if __name__ == "__main__":
    for sizes, counters in counted().items():
        for name, counter in counters.items():
            print(f"\n{sizes.name} layer, {name}\n{by_operator(counter)}")
