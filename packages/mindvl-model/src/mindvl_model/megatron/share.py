# SPDX-License-Identifier: Apache-2.0
"""Which part of the whole model this process holds: its ranks, and the global names of its parameters.

Comes after the model is built in its layout, before weights are read or started.
"""

import re

import torch
from megatron.core import parallel_state

from mindvl_model.weights.layout import WHOLE, Share

_LAYER = re.compile(r"(language\.decoder\.layers\.)(\d+)\.")
EMBEDDING = "language.embedding.word_embeddings.weight"
HEAD = "language.output_layer.weight"


def share_of(model: torch.nn.Module, param_name: str) -> Share:
    """This process's ranks among those that a parameter is split over, by its global name."""
    parallel = getattr(model, "parallel", None)
    if parallel is not None and parallel.spread_images and not param_name.startswith("language."):
        return WHOLE  # vision encoder and projector are not split where each rank encodes other images
    return Share(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
    )


def global_name(model: torch.nn.Module, param_name: str) -> str:
    """The name a parameter of this (virtual) pipeline stage has in the whole model.

    A stage counts its layers from 0, and the last one holds a copy of tied embeddings under the name of the head.
    """
    if param_name == HEAD and getattr(model, "share_embeddings_and_output_weights", False):
        return EMBEDDING
    found = _LAYER.match(param_name)
    if found is None:
        return param_name
    layer: torch.nn.Module = model.get_submodule(f"{found[1]}{found[2]}")
    number = int(layer.layer_number) - 1  # type: ignore[arg-type]  # megatron-core counts from 1, over all stages
    return f"{found[1]}{number}.{param_name[found.end() :]}"
