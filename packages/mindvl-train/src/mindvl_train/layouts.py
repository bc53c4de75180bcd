# SPDX-License-Identifier: Apache-2.0
"""The layout of a run: how its model is spread, and whether that fits model, batch and number of processes.

Comes after the recipe and before anything heavy; needs no process group and no megatron-core.
"""

import math
from dataclasses import replace

import torch

from mindvl_model import ModelError
from mindvl_model.layout import Layout, check_layout, chunk_layers
from mindvl_model.vision.spread import spreading_wins
from mindvl_train.config import RunConfig
from mindvl_train.errors import TrainError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def layout_of(config: RunConfig) -> Layout:
    """How the model of a run is spread and computed; whether images are spread is decided here where nobody says."""
    parallel, recompute = config.parallel, config.recompute
    layout = Layout(
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        cp_size=parallel.cp_size,
        ep_size=parallel.ep_size,
        virtual_stages=parallel.virtual_stages,
        stage_layers=parallel.stage_layers,
        recompute=recompute.kind,
        recompute_layers=recompute.layers,
        dtype=DTYPES[config.precision],
    )
    spread = parallel.spread_images
    return replace(layout, spread_images=spreading_wins(config.model.resolve(), layout) if spread is None else spread)


def fewest_processes(config: RunConfig) -> int:
    """The smallest number of processes a layout can be spread over."""
    parallel = config.parallel
    dp_size = parallel.ep_size // math.gcd(parallel.tp_size * parallel.cp_size, parallel.ep_size)
    return parallel.model_parallel_size * dp_size


def data_parallel_size(config: RunConfig, num_processes: int) -> int:
    """What the layout leaves of the processes for data parallel, once all of it is found to fit.

    Raises:
        TrainError: It does not fit the processes, the packs of a step or the model; the message names the field.
    """
    parallel = config.parallel
    dp_size, rest = divmod(num_processes, parallel.model_parallel_size)
    if rest or not dp_size:
        raise TrainError(
            f"tp_size={parallel.tp_size} * pp_size={parallel.pp_size} * cp_size={parallel.cp_size} = "
            f"{parallel.model_parallel_size} does not divide {num_processes} processes. parallel. Start a multiple of "
            f"{parallel.model_parallel_size} processes, or change the layout."
        )
    _check_packs(config, dp_size)
    _check_experts(config, num_processes)
    _check_model(config)
    return dp_size


def _check_packs(config: RunConfig, dp_size: int) -> None:
    parallel, packs = config.parallel, config.global_batch_size
    if packs % dp_size:
        raise TrainError(
            f"global_batch_size={packs} cannot be dealt to {dp_size} data-parallel ranks. Recipe. "
            f"Use a multiple of {dp_size}."
        )
    if parallel.virtual_stages > 1 and (packs // dp_size) % parallel.pp_size:
        raise TrainError(
            f"global_batch_size={packs} gives each of {dp_size} data-parallel ranks {packs // dp_size} microbatches, but "
            f"interleaved stages take them in groups of pp_size={parallel.pp_size}. parallel.virtual_stages. Use a "
            f"multiple of {dp_size * parallel.pp_size} packs, or virtual_stages=1."
        )


def _check_experts(config: RunConfig, num_processes: int) -> None:
    ep_size, of_stage = config.parallel.ep_size, num_processes // config.parallel.pp_size
    num_experts: int = getattr(config.model.resolve().language, "num_experts", 0)
    if ep_size > 1 and not num_experts:
        raise TrainError(f"ep_size={ep_size}, but the model has no experts. parallel.ep_size. Use 1.")
    if num_experts % ep_size:
        raise TrainError(f"ep_size={ep_size} cannot split {num_experts} experts. parallel.ep_size. Use a divisor.")
    if of_stage % ep_size:
        raise TrainError(
            f"ep_size={ep_size} does not divide the {of_stage} processes of a pipeline stage, which are those of tp, "
            f"cp and dp. parallel.ep_size. Use a divisor, or a multiple of {fewest_processes(config)} processes."
        )


def _check_model(config: RunConfig) -> None:
    model, layout = config.model.resolve(), layout_of(config)
    language = model.language
    try:
        check_layout(model, layout)
        layers = chunk_layers(language.num_layers, layout)
    except ModelError as error:
        raise TrainError(f"parallel: {error}") from error
    predicts_further = getattr(language, "num_mtp_layers", 0) > 0
    if layout.num_chunks > 1 and language.tie_embeddings and predicts_further:
        raise TrainError(
            f"pp_size={layout.pp_size} with tied embeddings and multi-token prediction: the last stage would hold the "
            "embedding twice. parallel.pp_size. Use 1, or model.language.num_mtp_layers=0."
        )
    if layout.recompute_layers is not None and layout.recompute_layers > max(layers):
        raise TrainError(
            f"layers={layout.recompute_layers}, but no chunk of the model has more than {max(layers)} language layers. "
            "recompute.layers. Use fewer, or leave it out for all."
        )
