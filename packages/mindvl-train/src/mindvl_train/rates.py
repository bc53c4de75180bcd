# SPDX-License-Identifier: Apache-2.0
"""The learning rate of a step, and that of each parameter as a multiple of it: rates by part, and layer-wise decay.

The optimizer has one parameter group for each multiple. Layer-wise decay is that of BEiT
(arXiv 2106.08254): with L layers and decay d, layer i from 0 has the factor d^(L - i), the embedding before the layers
d^(L + 1), and what follows the layers 1.
"""

import math
import re

from mindvl_model import MindVLConfig
from mindvl_train.config import RunConfig, ScheduleConfig

_LAYER = re.compile(r"(vision\.blocks|language\.decoder)\.layers\.(\d+)\.")
_BEFORE_LAYERS = ("vision.patch_embed.", "vision.position_embedding.", "language.embedding.")
_PARTS = {"language.embedding.": "embedding", "language.output_layer.": "head"}  # parts of the language model


def learning_rate(config: ScheduleConfig, step: int) -> float:
    """Learning rate of the update after `step` finished ones; step is in [0, steps - 1]."""
    warmup = round(config.steps * config.lr_warmup_ratio)
    if step < warmup:
        return config.peak_lr * (step + 1) / warmup
    progress = (step - warmup + 1) / max(1, config.steps - warmup)
    return config.min_lr + (config.peak_lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def rate_factor(param_name: str, schedule: ScheduleConfig, model: MindVLConfig) -> float:
    """Learning rate of a parameter divided by that of the schedule.

    Args:
        param_name: Name in the whole model, so that it does not depend on the pipeline stage.
    """
    return _part_factor(param_name, schedule) * _depth_factor(param_name, schedule, model)


def part_factors(config: RunConfig) -> dict[str, float]:
    """The factor of each part whose learning rate the recipe names, without layer-wise decay."""
    schedule = config.schedule
    named = vars(schedule.peak_lr_by_part).items()
    return {part: rate / schedule.peak_lr for part, rate in named if rate is not None}


def _part_factor(param_name: str, schedule: ScheduleConfig) -> float:
    rates = vars(schedule.peak_lr_by_part)
    part = param_name.split(".", 1)[0]
    inner = next((name for prefix, name in _PARTS.items() if param_name.startswith(prefix)), None)
    rate = rates[part] if inner is None or rates[inner] is None else rates[inner]
    return 1.0 if rate is None else float(rate / schedule.peak_lr)


def _depth_factor(param_name: str, schedule: ScheduleConfig, model: MindVLConfig) -> float:
    part = param_name.split(".", 1)[0]
    decay: float = vars(schedule.layer_decay).get(part, 1.0)
    num_layers = model.vision.num_layers if part == "vision" else model.language.num_layers
    if param_name.startswith(_BEFORE_LAYERS):
        return float(decay ** (num_layers + 1))
    found = _LAYER.match(param_name)
    return 1.0 if found is None else float(decay ** (num_layers - int(found[2])))
