# SPDX-License-Identifier: Apache-2.0
"""Choose the accelerator once per process and make megatron-core run on it.

Comes before everything that imports megatron-core (mindvl_model.megatron calls `enter` on import of its first module).
"""

import importlib
import importlib.util
import logging
import sys
import warnings
from dataclasses import dataclass
from typing import Literal

import torch

from mindvl_model.errors import ModelError

logger = logging.getLogger(__name__)

Kind = Literal["npu", "cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The device of this process and the collectives that go with it."""

    kind: Kind
    collective_backend: str  # name for torch.distributed

    def device(self, local_rank: int = 0) -> torch.device:
        """The device a process with this local rank computes on."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, local_rank)


BACKENDS: dict[Kind, str] = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}

_entered: Accelerator | None = None


def detect() -> Kind:
    """What this machine has: an NPU, else a CUDA GPU, else the CPU. Imports torch_npu only where it is installed."""
    if importlib.util.find_spec("torch_npu") is not None and torch.version.cuda is not None:
        # Both register an allocator under one name, and the second one ends the process.
        logger.warning("torch_npu is installed beside a CUDA build of torch, which it cannot share a process with")
    elif importlib.util.find_spec("torch_npu") is not None:
        try:
            import torch_npu  # noqa: F401

            if torch.get_device_module("npu").is_available():
                return "npu"
        except Exception as error:  # the wheel without a whole CANN raises many kinds, a bare Exception among them
            logger.warning("torch_npu is installed but does not load (%s); looking for other devices", error)
    return "cuda" if torch.cuda.is_available() else "cpu"


def enter(kind: Kind | None = None) -> Accelerator:
    """Prepare this process for its accelerator; calling it again returns the first answer.

    Args:
        kind: Which device to use; detected when None.

    Raises:
        ModelError: Another kind was entered before, megatron-core was imported without coming through here, or it has
            a version that the device setup is not written for.
    """
    global _entered
    if _entered is not None:
        if kind not in (None, _entered.kind):
            raise ModelError(
                f"accelerator: {kind!r} asked for, but this process runs on {_entered.kind!r}. Start anew."
            )
        return _entered
    if "megatron.core" in sys.modules:
        raise ModelError("accelerator: megatron.core was imported before mindvl_model. Import mindvl_model first.")
    from mindvl_model.accelerator.megatron import check_version

    check_version()
    chosen = kind or detect()
    _silence()
    if chosen == "cpu":
        from mindvl_model.accelerator.cpu import let_cuda_mean_cpu, restore_compile

        let_cuda_mean_cpu()
        _finish_megatron()
        restore_compile()
    else:
        if chosen == "npu":
            from mindvl_model.accelerator.npu import let_cuda_mean_npu

            let_cuda_mean_npu()
        _finish_megatron()
    _entered = Accelerator(kind=chosen, collective_backend=BACKENDS[chosen])
    logger.info("accelerator: %s, collectives: %s", _entered.kind, _entered.collective_backend)
    return _entered


def _silence() -> None:
    """Keep back what megatron-core and torch say in every run and nobody can act on."""
    for message in (
        r"(Transformer Engine and )?Apex (is|are) not installed",  # we bring our own norm and optimizer
        r"full scope is deprecated",
        r"When using .* it is recommended to set the environment variable CUDA_DEVICE_MAX",  # the run does, on CUDA
        r"The \.grad attribute of a Tensor that is not a leaf",  # its optimizer looks at shards of parameters
        r"`torch\.distributed\.\w+` is deprecated",
        r"Please use DTensor instead",
        r"`load_state_dict` is deprecated",
    ):
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # a CUDA toolkit without a GPU


def _finish_megatron() -> None:
    from mindvl_model.accelerator.deferred import USED_IN_TRAINING, defer_dynamo, deferred
    from mindvl_model.accelerator.megatron import without_transformer_engine

    defer_dynamo()
    with deferred():
        without_transformer_engine()
        for name in USED_IN_TRAINING:
            importlib.import_module(name)
