# SPDX-License-Identifier: Apache-2.0
"""RunConfig -> ResolvedRun: everything that follows from a recipe and the number of processes, computed and checked once.

Comes after the recipe and before anything is built; needs no process group and no megatron-core.
"""

import math
from dataclasses import dataclass, replace

import torch

from mindvl_data import load_tokenizer
from mindvl_model import MindVLConfig, ModelError, for_tokenizer
from mindvl_model.parallel_config import BuildConfig, ParallelConfig, check_parallel, chunk_layers, expert_blocks
from mindvl_model.vision.spread import spreading_wins
from mindvl_train.config import RunConfig
from mindvl_train.errors import TrainError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A run configuration with the values derived from it."""

    config: RunConfig
    model: MindVLConfig  # with token ids 0 until `with_tokenizer`
    build: BuildConfig  # parallel layout with spread_images decided, recomputation, data type
    num_processes: int
    dp_size: int
    num_microbatches: int  # packs per data-parallel rank and step
    chunk_layers: tuple[int, ...]  # language layers of each model chunk, first to last

    @property
    def parallel(self) -> ParallelConfig:
        """The parallel layout; spread_images is true or false."""
        return self.build.parallel


def resolve_run(config: RunConfig, num_processes: int) -> ResolvedRun:
    """Derive sizes and parallel layout of a run on num_processes processes, and check that they fit together.

    Raises:
        TrainError: The parallel layout does not fit the processes, the global batch size or the model; the message
            names the field.
    """
    model, parallel = config.model.resolved, config.parallel
    dp_size, rest = divmod(num_processes, parallel.model_parallel_size)
    if rest or not dp_size:
        raise TrainError(
            f"parallel: tp_size={parallel.tp_size} * pp_size={parallel.pp_size} * cp_size={parallel.cp_size} = "
            f"{parallel.model_parallel_size} does not divide {num_processes} processes. Start a multiple of "
            f"{parallel.model_parallel_size} processes, or change the parallel layout."
        )
    _check_batch(config, dp_size)
    if parallel.spread_images is None:
        parallel = replace(parallel, spread_images=spreading_wins(model, parallel))
    try:
        check_parallel(model, parallel)
    except ModelError as error:
        raise TrainError(str(error)) from error
    stage_processes = num_processes // parallel.pp_size
    if stage_processes % parallel.ep_size:
        raise TrainError(
            f"parallel.ep_size: {parallel.ep_size} does not divide the {stage_processes} processes (tp * cp * dp) of a "
            f"pipeline stage. Use a divisor, or a multiple of {min_processes(parallel)} processes."
        )
    layers = chunk_layers(model.language.num_layers, parallel)
    if config.recompute.layers is not None and config.recompute.layers > max(layers):
        raise TrainError(
            f"recompute.layers: {config.recompute.layers}, but no model chunk has more than {max(layers)} language "
            "layers. Use fewer, or leave it out to recompute all."
        )
    if config.recompute.offload_layers > max(layers):
        raise TrainError(
            f"recompute.offload_layers: {config.recompute.offload_layers}, but no model chunk has more than {max(layers)} "
            "language layers. Use fewer."
        )
    return ResolvedRun(
        config=config,
        model=model,
        build=BuildConfig(
            parallel=parallel,
            recompute=config.recompute,
            dtype=DTYPES[config.precision],
            seq_length=config.data.packing.seq_length,
        ),
        num_processes=num_processes,
        dp_size=dp_size,
        num_microbatches=config.global_batch_size // dp_size,
        chunk_layers=layers,
    )


def capacity_warning(run: ResolvedRun) -> list[str]:
    """What to know about `parallel.expert_capacity_factor` before the run starts; nothing if it works as usual."""
    parallel, experts = run.parallel, run.model.language.experts
    factor = parallel.expert_capacity_factor
    if factor is None:
        return []
    where = f"parallel.expert_capacity_factor: {factor:g}"
    blocks = expert_blocks(experts, parallel, run.config.data.packing.seq_length)
    if blocks is None:
        return [f"{where} has no effect with ep_size=1. Remove it, or set parallel.ep_size."]
    if not blocks.can_overflow:
        return [
            f"{where}: messages have room for any routing with {blocks.rows:,} rows, so no step is repeated. Use a smaller "
            "factor to send and store fewer rows."
        ]
    return []


def with_tokenizer(run: ResolvedRun) -> ResolvedRun:
    """The same run with the token ids of its tokenizer in the model configuration."""
    return replace(run, model=tokenized_model(run.config))


def tokenized_model(config: RunConfig) -> MindVLConfig:
    """The model configuration of a recipe with the token ids of its tokenizer."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    return for_tokenizer(config.model.resolved, tokenizer.special_ids, tokenizer.vocab_size)


def min_processes(parallel: ParallelConfig) -> int:
    """The smallest number of processes that a parallel layout can run on."""
    dp_size = parallel.ep_size // math.gcd(parallel.tp_size * parallel.cp_size, parallel.ep_size)
    return parallel.model_parallel_size * dp_size


def _check_batch(config: RunConfig, dp_size: int) -> None:
    parallel, batch_size = config.parallel, config.global_batch_size
    if batch_size % dp_size:
        raise TrainError(
            f"global_batch_size: {batch_size} is not divisible by dp_size={dp_size}. Use a multiple of {dp_size}."
        )
    if parallel.virtual_stages > 1 and (batch_size // dp_size) % parallel.pp_size:
        raise TrainError(
            f"global_batch_size: {batch_size} is {batch_size // dp_size} microbatches per data-parallel rank, but with "
            f"virtual_stages={parallel.virtual_stages} it must be a multiple of pp_size={parallel.pp_size}. Use a "
            f"multiple of {dp_size * parallel.pp_size}, or virtual_stages=1."
        )
