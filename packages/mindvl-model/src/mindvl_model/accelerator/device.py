# SPDX-License-Identifier: Apache-2.0
"""Choose the accelerator once per process and make megatron-core run on it.

Runs before everything that imports megatron-core; mindvl_model.megatron calls `set_up_device` when it is imported.
"""

import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch

from mindvl_model.errors import ModelError

logger = logging.getLogger(__name__)

Kind = Literal["npu", "cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The device of this process and its backend for collectives."""

    kind: Kind
    collective_backend: str  # of torch.distributed: "hccl", "nccl" or "gloo"

    def device(self, local_rank: int = 0) -> torch.device:
        """The torch device of the process with this local rank."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, local_rank)


BACKENDS: dict[Kind, str] = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}

_current: Accelerator | None = None


def detect() -> Kind:
    """The accelerator of this machine: an NPU, else a CUDA GPU, else the CPU. Imports torch_npu if it is installed."""
    if importlib.util.find_spec("torch_npu") is not None and torch.version.cuda is not None:
        # Both register an allocator under the same name, and the second registration aborts the process.
        logger.warning(
            "accelerator: torch_npu and a CUDA build of torch %s are installed together and cannot share a process; "
            "torch_npu is ignored. Install a CPU build of torch to use the NPU.",
            torch.__version__,
        )
    elif importlib.util.find_spec("torch_npu") is not None:
        try:
            import torch_npu  # noqa: F401

            if torch.get_device_module("npu").is_available():
                return "npu"
        except Exception as error:  # with an incomplete CANN installation the wheel raises even a bare Exception
            logger.warning(
                "accelerator: torch_npu is installed but fails to load (%s), so the NPU is not used. Check the CANN "
                "installation.",
                error,
            )
    return "cuda" if torch.cuda.is_available() else "cpu"


def set_up_device(kind: Kind | None = None) -> Accelerator:
    """Set up this process for its accelerator; later calls return the result of the first.

    Args:
        kind: The accelerator to use; detected when None.

    Raises:
        ModelError: The process is set up for another accelerator, megatron-core was imported before this call, or its
            version is not supported.
    """
    global _current
    if _current is not None:
        if kind not in (None, _current.kind):
            raise ModelError(
                f"accelerator: {kind!r} was requested, but this process is set up for {_current.kind!r}. "
                "Start a new process."
            )
        return _current
    if "megatron.core" in sys.modules:
        raise ModelError(
            "accelerator: megatron.core was imported before the device was set up. Import mindvl_model.megatron or call "
            "mindvl_model.set_up_device() first."
        )
    from mindvl_model.accelerator.megatron import check_version

    check_version()
    chosen = kind or detect()
    _filter_warnings()
    if chosen == "cpu":
        from mindvl_model.accelerator.cpu import map_cuda_to_cpu

        map_cuda_to_cpu()
    elif chosen == "npu":
        from mindvl_model.accelerator.npu import map_cuda_to_npu

        map_cuda_to_npu()
    _import_megatron()
    _current = Accelerator(kind=chosen, collective_backend=BACKENDS[chosen])
    logger.info("accelerator: %s, collective backend: %s", _current.kind, _current.collective_backend)
    return _current


def _filter_warnings() -> None:
    """Filter warnings of megatron-core and torch that appear in every run and need no action."""
    for message in (
        r"(Transformer Engine and )?Apex (is|are) not installed",  # mindvl_ops has its own norm and optimizer
        r"full scope is deprecated",
        r"When using .* it is recommended to set the environment variable CUDA_DEVICE_MAX",  # mindvl_train sets it
        r"The \.grad attribute of a Tensor that is not a leaf",  # the optimizer reads .grad of parameter shards
        r"`torch\.distributed\.\w+` is deprecated",
        r"Please use DTensor instead",
        r"`load_state_dict` is deprecated",
    ):
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # a CUDA toolkit on a machine without a GPU


def _import_megatron() -> None:
    from mindvl_model.accelerator.deferred import USED_IN_TRAINING, defer_dynamo, deferred
    from mindvl_model.accelerator.megatron import patch_megatron

    defer_dynamo()
    # megatron-core's jit_fuser is torch.compile, bound at import time. No layer of mindvl calls a function that it
    # decorates, and with a CUDA build torch.compile imports torch._inductor, which fails while modules are deferred.
    with mock.patch.object(torch, "compile", _uncompiled), deferred():
        patch_megatron()
        for name in USED_IN_TRAINING:
            importlib.import_module(name)


def _uncompiled(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    """In place of torch.compile, as a decorator with or without options."""
    return _uncompiled if function is None else function
