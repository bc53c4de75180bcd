# SPDX-License-Identifier: Apache-2.0
"""The cost of blocks whose weights are frozen and whose linear layers have adapters.

Comes after blocks.py and its users, before stages.py. Activations are kept as in full training, because A needs the input
of its layer; gradients of weights, their buffers and their optimizer states are those of the adapters only.
"""

import math
import re
from collections import defaultdict
from dataclasses import replace

from mindvl_model.adapters import LoRAConfig
from mindvl_model.adapters.sizes import published_size, target_parameters
from mindvl_model.adapters.targets import Target, find_targets
from mindvl_train.layout_search.blocks import Block, Setting

_OUTPUTS = 3.0  # outputs of the widest layer at the same time: of the weight, of the adapter, and their sum
_MASK_BYTES = 16  # per masked value: two int64 values of the hash


class Adapters:
    """Adds the adapters of a setting to its blocks."""

    def __init__(self, setting: Setting) -> None:
        assert setting.lora is not None
        self._setting, self._lora = setting, setting.lora
        self._of = _by_block(find_targets(setting.model, setting.lora, setting.trained))
        # The weights of every linear layer are quantized, with or without adapters.
        linear = {} if setting.lora.base_bits == 16 else find_targets(setting.model, LoRAConfig())
        self._quantized = _by_block(linear)

    def __call__(self, block: Block, number: int | None = None) -> Block:
        """The block with its adapters; `number` is the index of a decoder layer."""
        name = f"layer {number}" if number is not None else block.name
        block = self._with_quantized(block, self._quantized[name])
        if not block.trained:
            return block
        targets = self._of[name]
        setting, lora, model = self._setting, self._lora, self._setting.model
        experts = sum(target_parameters(model, lora, one) for one in targets if one.experts) // setting.ep_size
        dense = sum(target_parameters(model, lora, one) for one in targets if not one.experts)
        rows = setting.patches if block.part == "vision" else setting.tokens
        if block.part == "projector":
            rows = setting.patches // model.vision.spatial_merge_size**2
        sizes = [[published_size(model, one, index) for index in one.chosen] for one in targets if not one.experts]
        tp = 1 if block.part != "language" and setting.spread_images else setting.tp_size
        widest = rows * max((sum(out for _, out in of_layer) for of_layer in sizes), default=0) / tp
        inputs = rows * max((of_layer[0][0] for of_layer in sizes), default=0) / tp
        kept: float = setting.wide * rows * lora.rank * sum(len(of_layer) for of_layer in sizes)
        peak = (_OUTPUTS - 1) * setting.wide * widest
        if lora.dora:  # outputs before they are multiplied by the trained norms
            kept += setting.wide * rows * sum(out for of_layer in sizes for _, out in of_layer) / tp
            peak += setting.wide * widest
        if lora.dropout:  # masked inputs
            kept += setting.wide * rows * sum(of_layer[0][0] for of_layer in sizes) / tp
            peak = max(peak, _MASK_BYTES * inputs)
        forward = 2 * rows * sum(lora.rank * sum(pair) for of_layer in sizes for pair in of_layer) / tp
        if lora.dora:  # A times the weight, for the norms
            forward += 2 * sum(lora.rank * math.prod(pair) for of_layer in sizes for pair in of_layer) / tp
        return replace(
            block,
            adapters=dense + experts,
            adapters_experts=experts,
            kept=block.kept + kept,
            # Not at the moment of attention or of the activation, which need most in a block without adapters.
            forward_peak=kept + max(block.forward_peak, block.kept + peak),
            backward_peak=max(block.backward_peak, peak),
            matmul=block.matmul + forward,
            weights=False,
        )

    def _with_quantized(self, block: Block, linear: list[Target]) -> Block:
        """The block with quantized weights; while a layer computes, its weight is dequantized."""
        setting, stored = self._setting, self._lora.base_bytes
        if stored is None or not linear:
            return block
        tp = 1 if block.part != "language" and setting.spread_images else setting.tp_size
        sizes = []
        for one in linear:
            size = sum(math.prod(published_size(setting.model, one, index)) for index in range(one.per_expert))
            if one.experts:
                size = size * (len(one.published) // one.per_expert) // setting.ep_size
            elif not one.layer.endswith("_down_proj"):  # replicated
                size //= tp
            sizes.append(size)
        widest = setting.wide * max(sizes)
        return replace(
            block,
            packed=sum(sizes),
            forward_peak=block.forward_peak + widest,
            backward_peak=block.backward_peak + widest,
            elementwise=block.elementwise + (stored + setting.wide) * sum(sizes),
        )


def _by_block(targets: dict[str, Target]) -> defaultdict[str, list[Target]]:
    found: defaultdict[str, list[Target]] = defaultdict(list)
    for target in targets.values():
        found[_block_of(target.layer)].append(target)
    return found


def _block_of(layer: str) -> str:
    """The name of the block of a layer of the model: a vision layer stands for all."""
    decoder = re.match(r"language\.decoder\.layers\.(\d+)\.", layer)
    if decoder:
        return f"layer {decoder[1]}"
    if layer.startswith("projector."):
        return "projector"
    return "vision layer" if layer.startswith("vision.blocks.layers.0.") else "further vision layer"
