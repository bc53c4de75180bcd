# SPDX-License-Identifier: Apache-2.0
"""Store the frozen weights below adapters in 8 or 4 bits (QLoRA, arXiv 2305.14314), with the functions of bitsandbytes.

Comes after adapters.py has attached adapters and weights are loaded, before gradient buffers. A weight is quantized on the
CPU, in blocks of consecutive elements of this rank's shard, and dequantized for each product: the backward pass does it
again, so that no dequantized weight is kept.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

import mindvl_ops as ops
from mindvl_model.adapters.lora_config import BLOCK_SIZE, LoRAConfig, quantization_problem
from mindvl_model.adapters.targets import linear_layers
from mindvl_model.config import MindVLConfig
from mindvl_model.errors import ModelError
from mindvl_model.megatron.experts import GroupedLinear
from mindvl_model.megatron.mla import DuplicatedLinear
from mindvl_model.megatron.share import global_name


@torch.no_grad()
def quantize_base(model: Any, config: MindVLConfig, lora: LoRAConfig) -> None:
    """Quantize the weights of all linear layers but the output layer, routers and multi-token prediction.

    Args:
        model: A MindVLModel with adapters, or one of its pipeline stages, with its weights, on the CPU.
        config: Configuration of the whole model.
        lora: Its adapters; nothing is done if its `base_bits` are 16.

    Raises:
        ModelError: bitsandbytes is not installed.
    """
    if lora.base_bits == 16:
        return
    problem = quantization_problem(lora, "cpu")
    if problem is not None:
        raise ModelError(problem)
    wanted = linear_layers(config)
    for name, linear in list(model.named_modules()):
        weight = getattr(linear, "weight", None)
        if not isinstance(weight, Tensor) or global_name(model, f"{name}.weight").removesuffix(".weight") not in wanted:
            continue
        quantized = QuantizedWeight(weight, lora.base_bits, nested=lora.double_quantization)
        del linear.weight
        linear.weight = quantized
        # Instances keep their class, whose forward pass calls this function with `self.weight`.
        products: dict[type, Any] = {GroupedLinear: _grouped, DuplicatedLinear: _plain}
        linear._forward_impl = next((found for kind, found in products.items() if isinstance(linear, kind)), _parallel)


class QuantizedWeight(torch.nn.Module):
    """A frozen weight in blocks of 8-bit or NF4 values. It has no parameters and no state to save."""

    def __init__(self, weight: Tensor, bits: int, *, nested: bool) -> None:
        from bitsandbytes import functional

        super().__init__()
        self.bits = bits
        values: Any = weight.detach().contiguous()
        if bits == 4:
            options: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": nested}
            self.packed, self.blocks = functional.quantize_4bit(values, blocksize=BLOCK_SIZE, **options)
        else:
            self.packed, self.blocks = functional.quantize_blockwise(values, blocksize=BLOCK_SIZE, nested=nested)

    def dequantized(self) -> Tensor:
        """The weight in the type and shape that it had before."""
        from bitsandbytes import functional

        dequantize = functional.dequantize_4bit if self.bits == 4 else functional.dequantize_blockwise
        weight: Tensor = dequantize(self.packed, self.blocks)
        return weight

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantizedWeight":
        """Move to a device. Types do not change: the largest value of each block stays in fp32 in a bf16 model."""
        super()._apply(fn, recurse)
        self.packed = fn(self.packed)
        self.blocks.to(self.packed.device)
        return self


class _Linear(torch.autograd.Function):
    """x W^T + bias for frozen W, with the gradient of x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, reduce_group: Any) -> Tensor:
        ctx.weight, ctx.reduce_group = weight, reduce_group
        return torch.nn.functional.linear(x, weight.dequantized(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].matmul(ctx.weight.dequantized())
        if ctx.reduce_group is not None:
            torch.distributed.all_reduce(gradient, group=ctx.reduce_group)
        return gradient, None, None, None


class _GroupedLinear(torch.autograd.Function):
    """Rows in groups, each times its own frozen matrix, with the gradient of the rows only."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: QuantizedWeight, sizes: Tensor | list[int]) -> Tensor:
        ctx.weight, ctx.sizes = weight, sizes
        return ops.grouped_matmul(rows, weight.dequantized(), sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        transposed = ctx.weight.dequantized().transpose(1, 2)
        return ops.grouped_matmul(gradients[0].contiguous(), transposed, ctx.sizes), None, None


def _plain(x: Tensor, weight: QuantizedWeight) -> Tensor:
    output: Tensor = _Linear.apply(x, weight, None, None)
    return output


def _parallel(
    *,
    input: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    **_: Any,
) -> Tensor:
    """The product of a parallel linear layer of megatron-core, with the keywords that it passes."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    output: Tensor = _Linear.apply(input, weight, bias, tp_group if allreduce_dgrad else None)
    return output


def _grouped(rows: Tensor, weight: QuantizedWeight, sizes: Tensor | list[int]) -> Tensor:
    output: Tensor = _GroupedLinear.apply(rows, weight, sizes)
    return output
