# SPDX-License-Identifier: Apache-2.0
"""Run card: everything needed to compare a run with others, written to OUT/run.json at every start.

Comes before the first step, after process groups and sinks; `mindvl report` shows it with the metrics.
"""

import datetime
import importlib.metadata
import os
import platform
from typing import Any

import torch

from mindvl_data import DataConfig, redact
from mindvl_model import MindVLConfig
from mindvl_model.counts import count_parameters
from mindvl_model.flops import pack_flops
from mindvl_model.parameters import PARTS
from mindvl_train.adapters import trained_parameters
from mindvl_train.checkpoints.directory import plain_json
from mindvl_train.checkpoints.integrity import write_json
from mindvl_train.config import RunConfig
from mindvl_train.devices import find_device, name_of
from mindvl_train.metrics.commit import commit
from mindvl_train.metrics.pack_counts import RunFacts
from mindvl_train.parallel_state import ParallelState
from mindvl_train.rates import part_factors

FILE = "run.json"
FORMAT = 1

FLOPS_FORMULA = (
    "A product of [M, K] and [K, N] counts 2 * M * K * N, in forward and backward; frozen parts have no weight "
    "gradients, and the small matrices of adapters are not counted. "
    "Causal attention counts the triangle of each sample, windowed attention its windows, "
    "the output layer the loss tokens. Padding, "
    "recomputed activations, norms and element-wise operations are not counted."
)

_VERSIONS = (
    "mindvl-train", "mindvl-data", "mindvl-model", "mindvl-ops", "torch", "torch-npu", "megatron-core", "transformers",
    "numpy",
)  # fmt: skip


def run_facts(config: RunConfig, model: MindVLConfig, device: torch.device) -> RunFacts:
    """Constants of a run that its metrics need."""
    return RunFacts(
        model=model,
        sources=tuple(source.name for source in config.data.sources),
        seq_length=config.data.packing.seq_length,
        trained_parts=config.trained_parts,
        adapted=config.adapter is not None,
        rate_factors=part_factors(config),
        peak_tflops=_peak(config, device)[0],
    )


def write_card(config: RunConfig, model: MindVLConfig, ranks: ParallelState, *, start_step: int) -> None:
    """Write OUT/run.json; called on rank 0 only.

    Args:
        start_step: 0, or the step of the resumed checkpoint.
    """
    counts = count_parameters(model)
    by_part = {"vision": counts.vision, "projector": counts.projector, "language": counts.language + counts.mtp}
    peak, peak_source = _peak(config, ranks.device)
    adapted = config.adapter is not None
    dense = pack_flops(model, [config.data.packing.seq_length], trainable=config.trained_parts, adapted=adapted)
    card = {
        "format": FORMAT,
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "start_step": start_step,
        "phase": config.phase,
        "trained_parts": list(config.trained_parts),
        "frozen_parts": [part for part in PARTS if part not in config.trained_parts],
        "parameters": {
            **by_part,
            "total": counts.total,
            "trained": sum(trained_parameters(config, model).values()),
            "language_for_one_token": counts.activated,
        },
        "model": plain_json(model),
        "flops": {"formula": FLOPS_FORMULA, "of_a_full_pack_of_text": dense.total},
        "precision": config.precision,
        "layout": {**plain_json(config.parallel), "dp_size": ranks.dp_size, "recompute": plain_json(config.recompute)},
        "schedule": {**plain_json(config.schedule), "global_batch_size": config.global_batch_size},
        "adapter": plain_json(config.adapter),
        "optimizer": plain_json(config.optimizer),
        "seeds": {"weights": config.seed, "data": config.data.seed},
        "init": plain_json(config.init),
        "data": _data(config.data),
        "hardware": {
            "device": name_of(ranks.device),
            "count": ranks.num_ranks,
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "platform": platform.platform(),
            "peak_tflops": peak,
            "peak_source": peak_source,
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": commit(),
    }
    write_json(config.out / FILE, card)


def _data(data: DataConfig) -> dict[str, Any]:
    total = sum(source.weight for source in data.sources)
    return {
        "sources": [
            {"name": source.name, "path": redact(str(source.path)), "share_asked": source.weight / total}
            for source in data.sources
        ],
        "weight_unit": data.weight_unit,
        "text_share": data.text_share,
        "seq_length": data.packing.seq_length,
        "image": {"min_pixels": data.image.min_pixels, "max_pixels": data.image.max_pixels},
    }


def _peak(config: RunConfig, device: torch.device) -> tuple[float | None, str]:
    """bf16 peak of one device [TFLOP/s], and its source."""
    if config.metrics.peak_tflops is not None:
        return config.metrics.peak_tflops, "metrics.peak_tflops"
    name = name_of(device)
    found = find_device(name)
    return (None, f"no peak of {name} is known") if found is None else (found.bf16_tflops, found.source)


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # torch-npu is installed only on machines with NPUs
            continue
    return found
