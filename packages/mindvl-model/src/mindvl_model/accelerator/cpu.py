# SPDX-License-Identifier: Apache-2.0
"""Map the device name "cuda" to the CPU, so that megatron-core 0.16.1 runs unmodified over gloo.

Applied before the first import of megatron-core. torch.cuda.is_available() stays False, so torch's own code takes no
CUDA path. Each patched name gets its own function object, because torch._dynamo does not accept shared ones.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from mindvl_model.accelerator.tensor_type import report_cuda_tensor_types

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")


class _Event(torch.cpu.Event):
    """An event that is always complete, because the CPU has a single queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def query(self) -> bool:
        return True

    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Stream(torch.cpu.Stream):
    """The single queue of the CPU with the interface of a CUDA stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None: ...
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__


def map_cuda_to_cpu() -> None:
    """Patch torch.cuda, device="cuda", Tensor.cuda and two collectives of gloo. Call once, before megatron-core."""
    _patch_cuda_module()
    _patch_generator()
    _device_constructors()  # caches the original functions; otherwise `with torch.device(...)` would skip the patched
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    report_cuda_tensor_types("")
    _patch_gloo()


def _use_stream(stream: Any) -> Any:
    return torch.cpu.stream(stream)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _patch_cuda_module() -> None:
    stream = _Stream()
    return_values: dict[str, Any] = {
        "device_count": 1,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "memory_stats": {},
        "mem_get_info": (0, 0),
        "current_device": "cpu",
        "current_stream": stream,
        "default_stream": stream,
        "_lazy_init": None,
    }
    for name, value in return_values.items():
        setattr(torch.cuda, name, _constant(value))
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event  # type: ignore[misc,assignment]
    torch.cuda.stream = _use_stream
    # The original queues the callback until CUDA is initialized, which never happens here.
    torch.cuda._lazy_call = lambda callback, **kwargs: callback()


def _patch_generator() -> None:
    generator = torch.default_generator
    torch.cuda.default_generators = {"cpu": generator, 0: generator}  # type: ignore[assignment]
    modules: tuple[Any, ...] = (torch.cuda, torch.cuda.random)
    for module in modules:
        module.manual_seed = lambda seed: generator.manual_seed(seed)
        module.manual_seed_all = lambda seed: generator.manual_seed(seed)
        module.get_rng_state = lambda *args, **kwargs: generator.get_state()
        module.set_rng_state = lambda state, *args: generator.set_state(state)
    # Device and host share one generator here, so this warning of the RNG tracker would always be a false alarm.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def factory_on_cpu(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # pinned memory needs an accelerator
        return factory(*args, **kwargs)

    return factory_on_cpu


def _patch_gloo() -> None:
    collectives = dist.distributed_c10d
    isend, all_to_all_single = collectives.isend, dist.all_to_all_single

    # deallocate_pipeline_outputs frees the data of a tensor that gloo is still sending, so gloo gets an alias.
    def isend_alias(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return isend(tensor.detach(), *args, **kwargs)

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    # megatron-core converts split sizes to lists only for tensors with is_cuda=True.
    def all_to_all_lists(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        sizes = as_list(output_split_sizes), as_list(input_split_sizes)
        return all_to_all_single(output, input, *sizes, group, async_op)

    collectives.isend = dist.isend = isend_alias
    dist.all_to_all_single = all_to_all_lists
