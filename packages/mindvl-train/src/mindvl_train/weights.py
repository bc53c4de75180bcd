# SPDX-License-Identifier: Apache-2.0
"""The model of a run with its initial weights: from an earlier phase, from transformers checkpoints, or random.

Comes after the process groups, before gradient buffers.
"""

import logging

import torch

from mindvl_model import MindVLConfig, MindVLModel
from mindvl_model.adapters.lora_config import quantization_problem
from mindvl_model.hf.load import load_hf_directory
from mindvl_model.megatron.quantized import quantize_base
from mindvl_model.megatron.stages import build_stages
from mindvl_model.parameters import Part, initialize
from mindvl_train.adapters import choose_trained, start_adapters, start_norms
from mindvl_train.checkpoints.directory import newest_checkpoint
from mindvl_train.checkpoints.restore import load_weights
from mindvl_train.config import RunConfig
from mindvl_train.errors import TrainError
from mindvl_train.resolved_run import ResolvedRun

logger = logging.getLogger(__name__)

_FROZEN_ROWS = (
    ". Adapters neither train nor store them: add them to the base model first (mindvl convert with --tokenizer, and the result "
    "back to a directory for init.model)"
)


def build_models(run: ResolvedRun, device: torch.device, *, load_init: bool) -> list[MindVLModel]:
    """Build the model chunks of this rank, load their weights, freeze parts that are not trained, attach adapters.

    Args:
        load_init: False if a checkpoint will overwrite all weights; a checkpoint of adapters does not.

    Returns:
        One chunk per virtual stage of this pipeline rank, first to last.

    Raises:
        TrainError: The weights below adapters cannot be quantized on this device.
    """
    problem = quantization_problem(run.config.adapter, device.type)
    if problem is not None:
        raise TrainError(problem)
    models = build_stages(run.model, run.build)
    for model in models:
        if load_init:
            loaded = _load_init(model, run.model, run.config)
            initialize(model, run.model, run.config.seed, loaded=loaded)
        choose_trained(model, run.model, run.config)
        if run.config.adapter is not None and load_init:
            start_adapters(model, run.config)
            quantize_base(model, run.model, run.config.adapter)
    models = [model.to(device) for model in models]
    if run.config.adapter is not None and load_init:
        start_norms(models, run.config)
    return models


def _load_init(model: MindVLModel, model_config: MindVLConfig, config: RunConfig) -> set[str]:
    """Load the weights that `init` names; returns the global names of the parameters that have values now."""
    init, loaded = config.init, set[str]()
    if init.checkpoint is not None:
        checkpoint = newest_checkpoint(init.checkpoint)
        loaded |= load_weights(checkpoint, model)
        logger.info("loaded weights of all parts from %s", checkpoint)
    parts_by_field: list[tuple[str, tuple[Part, ...]]] = [
        ("model", ("vision", "projector", "language")),
        ("vision", ("vision",)),
        ("language", ("language",)),
    ]
    for name, parts in parts_by_field:
        directory = getattr(init, name)
        if directory is not None:
            report = load_hf_directory(model, model_config, directory, parts, seed=config.seed)
            loaded |= set(report.loaded)
            logger.info(
                "loaded %d parameters of %s from %s (%s, %.1f MB read by this rank); %d tensors of other parts ignored",
                len(report.loaded),
                "/".join(parts),
                directory,
                ", ".join(f"{count} {change}" for change, count in report.converted.items()) or "no type conversion",
                report.bytes_read / 1e6,
                len(report.skipped),
            )
            for parameter, count in report.untrained_rows.items():
                logger.warning(
                    "%s: the last %d rows are initialized randomly, because %s lacks these tokens%s",
                    parameter,
                    count,
                    directory,
                    "" if config.adapter is None else _FROZEN_ROWS,
                )
            if report.redundant:
                logger.warning("%s: redundant tensors are ignored: %s", directory, ", ".join(report.redundant))
    return loaded
