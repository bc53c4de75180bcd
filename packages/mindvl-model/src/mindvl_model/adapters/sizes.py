# SPDX-License-Identifier: Apache-2.0
"""Number of parameters of adapters by part, from the configuration.

Used by reports, the dry run and the layout search, which have no model; comes after targets.py. Tests compare the counts
with a model on the meta device.
"""

from collections.abc import Iterable

from mindvl_model.adapters.lora_config import LoRAConfig
from mindvl_model.adapters.targets import Target, find_targets
from mindvl_model.config import MindVLConfig
from mindvl_model.parameters import PARTS, Part, parameter_group


def adapter_parameters(config: MindVLConfig, lora: LoRAConfig, parts: Iterable[Part] = PARTS) -> dict[Part, int]:
    """Parameters of the adapters of each part that may have some, over all ranks.

    Raises:
        ModelError: The targets do not fit the model.
    """
    counts: dict[Part, int] = {part: 0 for part in PARTS if part in set(parts)}
    for target in find_targets(config, lora, parts).values():
        counts[parameter_group(target.layer)] += target_parameters(config, lora, target)
    return counts


def target_parameters(config: MindVLConfig, lora: LoRAConfig, target: Target) -> int:
    """Parameters of the adapters of one layer of the model."""
    copies = len(target.published) // target.per_expert if target.experts else 1
    sizes = [published_size(config, target, index) for index in target.chosen]
    return copies * sum(lora.rank * (inputs + outputs) + lora.dora * outputs for inputs, outputs in sizes)


def published_size(config: MindVLConfig, target: Target, index: int) -> tuple[int, int]:
    """Input and output size of a published linear layer of a layer of the model; of one expert if it has experts."""
    layer, part = target.layer.rsplit(".", 1)[-1], parameter_group(target.layer)
    vision, language = config.vision, config.language
    if part == "projector":
        block = vision.hidden_size * vision.spatial_merge_size**2
        return block, block if layer == "fc1" else language.hidden_size
    hidden, ffn = vision.hidden_size, vision.ffn_hidden_size
    if part == "language":
        hidden, ffn = language.hidden_size, language.ffn_hidden_size
        experts = language.experts
        if experts is not None and "experts." in target.layer:
            ffn = experts.expert_ffn_hidden_size * (1 if target.experts else experts.num_shared_experts)
    if layer in ("linear_fc1", "linear_fc2"):
        return (hidden, ffn) if layer == "linear_fc1" else (ffn, hidden)
    if part == "vision":
        return hidden, 3 * hidden if layer == "linear_qkv" else hidden
    return language.attention.linear_sizes(hidden, language.num_heads)[layer][index]
