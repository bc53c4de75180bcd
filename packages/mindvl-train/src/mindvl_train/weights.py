# SPDX-License-Identifier: Apache-2.0
"""The model of a run with its starting weights: from an earlier phase, from transformers directories, or at random.

Comes after the process groups, before gradient buffers.
"""

import logging

import torch

from mindvl_model import MindVLConfig, MindVLModel
from mindvl_model.hf.load import load_hf_directory
from mindvl_model.megatron.stages import build_stages
from mindvl_model.parameters import Part, initialize, set_trainable
from mindvl_train.checkpoints.directory import newest_checkpoint
from mindvl_train.checkpoints.restore import load_weights
from mindvl_train.config import InitSection, RunConfig
from mindvl_train.layouts import layout_of

logger = logging.getLogger(__name__)


def build_models(
    config: RunConfig, model_config: MindVLConfig, device: torch.device, *, load_init: bool
) -> list[MindVLModel]:
    """Build what this process holds of the model, fill it, freeze what the phase does not train.

    Args:
        load_init: False when a checkpoint of this run follows and would overwrite everything.

    Returns:
        One chunk for each virtual stage of this pipeline rank, first to last.
    """
    models = build_stages(model_config, layout_of(config))
    for model in models:
        if load_init:
            initialize(model, model_config, config.seed)
            _load_init(model, model_config, config.init, config.seed)
        set_trainable(model, config.trained_parts)
    return [model.to(device) for model in models]


def _load_init(model: MindVLModel, model_config: MindVLConfig, init: InitSection, seed: int) -> None:
    if init.checkpoint is not None:
        checkpoint = newest_checkpoint(init.checkpoint)
        load_weights(checkpoint, model)
        logger.info("weights of all parts from %s", checkpoint)
    takes: list[tuple[str, tuple[Part, ...]]] = [
        ("model", ("vision", "projector", "language")),
        ("vision", ("vision",)),
        ("language", ("language",)),
    ]
    for name, parts in takes:
        directory = getattr(init, name)
        if directory is not None:
            report = load_hf_directory(model, model_config, directory, parts, seed=seed)
            logger.info(
                "%d parameters of %s from %s (%s, %.1f MB read here); %d of its tensors belong to other parts",
                len(report.loaded),
                "/".join(parts),
                directory,
                ", ".join(f"{count} {change}" for change, count in report.converted.items()) or "types as stored",
                report.bytes_read / 1e6,
                len(report.skipped),
            )
            for parameter, count in report.untrained_rows.items():
                logger.warning(
                    "the last %d rows of %s start at random: %s lacks these tokens", count, parameter, directory
                )
            if report.redundant:
                logger.warning("%s: redundant tensors are ignored: %s", directory, ", ".join(report.redundant))
