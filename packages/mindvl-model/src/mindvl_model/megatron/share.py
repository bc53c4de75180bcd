# SPDX-License-Identifier: Apache-2.0
"""The share of the whole model on this process: its coordinates, and the global names of its parameters.

Used after the model is built, to load or initialize its weights.
"""

import re

import torch
from megatron.core import parallel_state

from mindvl_model.weights.sharding import WHOLE, Share

_LAYER = re.compile(r"(language\.decoder\.layers\.)(\d+)\.")
EMBEDDING = "language.embedding.word_embeddings.weight"
HEAD = "language.output_layer.weight"


def share_of(model: torch.nn.Module, param_name: str) -> Share:
    """The tensor- and expert-parallel coordinates of this process for a parameter, given by its global name."""
    parallel = getattr(model, "parallel", None)
    if parallel is not None and parallel.spread_images and not param_name.startswith("language."):
        return WHOLE  # with spread images, vision encoder and projector are not split
    return Share(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
    )


def global_name(model: torch.nn.Module, param_name: str) -> str:
    """The name in the whole model of a parameter of this (virtual) pipeline stage.

    A stage numbers its layers from 0, and the last stage has a copy of tied embeddings as its output layer.
    """
    if param_name == HEAD and getattr(model, "share_embeddings_and_output_weights", False):
        return EMBEDDING
    found = _LAYER.match(param_name)
    if found is None:
        return param_name
    layer: torch.nn.Module = model.get_submodule(f"{found[1]}{found[2]}")
    number = int(layer.layer_number) - 1  # type: ignore[arg-type]  # global number of megatron-core, from 1
    return f"{found[1]}{number}.{param_name[found.end() :]}"
