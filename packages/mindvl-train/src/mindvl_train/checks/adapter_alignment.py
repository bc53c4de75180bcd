# SPDX-License-Identifier: Apache-2.0
"""The adapters of both sides of the alignment check: mindvl trains its own, the reference loop those of PEFT.

Used by alignment.py and plain.py. Both sides start from one PEFT directory, and are compared under the names of PEFT.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindvl_model.adapters.peft_directory import PREFIX, WEIGHTS, experts_module
from mindvl_model.adapters.peft_export import write_peft_directory
from mindvl_model.adapters.targets import Target, find_targets
from mindvl_train.config import RunConfig
from mindvl_train.errors import TrainError


def check_adapter(config: RunConfig) -> None:
    """Check that PEFT can train the adapters of a recipe in the same way.

    Raises:
        TrainError: There is dropout, whose masks differ; weights are quantized; or PEFT is not installed.
    """
    if config.adapter is None:
        return
    if config.adapter.dropout:
        raise TrainError(
            f"adapter.dropout: is {config.adapter.dropout}, but PEFT draws other masks. Set adapter.dropout=0 for this check."
        )
    if config.adapter.base_bits < 16:
        raise TrainError(
            f"adapter.base_bits: is {config.adapter.base_bits}, but the reference loop does not quantize. Set "
            "adapter.base_bits=16 for this check."
        )
    try:
        import peft  # noqa: F401
    except ImportError:
        raise TrainError(
            "adapter: the reference loop of this check needs PEFT, which is not installed. Run pip install peft."
        ) from None


def adapter_beside(start: Path) -> Path:
    """The PEFT directory of the initial adapters of a run, beside its initial weights."""
    return start.with_name(f"{start.name}-adapter")


def write_start_adapter(model: Any, config: RunConfig, start: Path) -> None:
    """Write the initial adapters of a whole model, if it has any."""
    if config.adapter is not None:
        held = {name: parameter.detach() for name, parameter in model.named_parameters()}
        write_peft_directory(
            adapter_beside(start),
            model.mindvl,
            config.adapter,
            config.trained_parts,
            held.__getitem__,
            base=start,
            dtype=torch.float32,
        )


def with_peft(model: Any, directory: Path, config: RunConfig) -> Any:
    """The same transformers model, whose layers PEFT has replaced by ones with trained adapters; all else is frozen."""
    from peft import PeftModel

    assert config.adapter is not None
    adapted = PeftModel.from_pretrained(model, str(directory), is_trainable=True).get_base_model()
    for target in find_targets(config.model.resolved, config.adapter, config.trained_parts).values():
        if target.experts and target.per_expert == 2:
            _keep_blocks(adapted, target, config.adapter.rank)
    return adapted


def _keep_blocks(model: Any, target: Target, rank: int) -> None:
    """Keep gate_proj and up_proj apart in PEFT's adapter of gate_up_proj: the other blocks of B stay zero.

    B is [2 * out, ranks * E] with the experts side by side in each rank; gate_proj has the first half of the rows.
    """
    experts = model.get_submodule(experts_module(target))
    inner: Any = getattr(experts, "base_layer", None)
    weight = (inner if hasattr(inner, "lora_B") else experts).lora_B["default"].weight
    blocks = torch.zeros_like(weight).unflatten(0, (2, -1)).unflatten(2, (len(target.chosen), rank, -1))
    for position, index in enumerate(target.chosen):
        blocks[index, :, position] = 1
    mask = blocks.reshape(weight.shape)
    weight.register_hook(lambda gradient: gradient * mask)


def exported_adapter(config: RunConfig, end: Path) -> dict[str, Tensor]:
    """The fp32 matrices at the end of a mindvl run, by their names in a model of PEFT."""
    from safetensors.torch import load_file

    from mindvl_model.megatron.process import single_process
    from mindvl_train.checkpoints.directory import newest_checkpoint
    from mindvl_train.megatron.checkpoint import MASTER
    from mindvl_train.megatron.tensor_files import TensorReader, stored_parameters
    from mindvl_train.resolved_run import DTYPES, tokenized_model

    assert config.adapter is not None
    model_config = tokenized_model(config)
    reader = TensorReader(newest_checkpoint(config.out) / "tensors")
    with single_process():
        stored = stored_parameters(model_config, DTYPES[config.precision], config.adapter, config.trained_parts)

    def read(name: str) -> Tensor:
        parameter = stored[name]
        master = f"{MASTER}{parameter.key}"  # the optimizer keeps fp32 copies of bf16 matrices
        if master in reader.tensors:
            parameter = replace(parameter, key=master, dtype=torch.float32)
        return reader.read(parameter).float()

    write_peft_directory(end, model_config, config.adapter, config.trained_parts, read, base=None)
    held = load_file(end / WEIGHTS)
    return {f"{name.removeprefix(PREFIX).removesuffix('.weight')}.default.weight": held[name] for name in held}
