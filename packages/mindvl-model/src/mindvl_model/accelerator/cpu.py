# SPDX-License-Identifier: Apache-2.0
"""Let the literal "cuda" mean the CPU, so that megatron-core 0.16.1 runs unmodified over gloo.

Comes before the first import of megatron-core. torch.cuda.is_available() stays False, so torch's own code takes no
CUDA path. Every name gets a function object of its own, because torch._dynamo refuses shared ones.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from mindvl_model.accelerator.tensor_type import answer_with_cuda_names

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")
_compile = torch.compile


class _Event(torch.cpu.Event):
    """An event that has always happened: the CPU has one queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def query(self) -> bool:
        return True

    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Stream(torch.cpu.Stream):
    """The one queue of the CPU under the names of a CUDA stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None: ...
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__


def let_cuda_mean_cpu() -> None:
    """Answer for torch.cuda, device="cuda", Tensor.cuda and gloo's two gaps; call once, before megatron-core."""
    _answer_for_cuda_module()
    _answer_for_generator()
    _device_constructors()  # cached with the originals, or `with torch.device(...)` would pass our factories over
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    answer_with_cuda_names("")
    _fill_gaps_of_gloo()
    # megatron's jit_fuser is torch.compile, taken at import time: it would want a C++ compiler and minutes.
    torch.compile = lambda fn=None, *args, **kwargs: fn if fn is not None else (lambda inner: inner)  # type: ignore


def restore_compile() -> None:
    """Give torch.compile back once megatron-core has been imported."""
    torch.compile = _compile


def _use_stream(stream: Any) -> Any:
    return torch.cpu.stream(stream)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _answer_for_cuda_module() -> None:
    stream = _Stream()
    answers: dict[str, Any] = {
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
    for name, value in answers.items():
        setattr(torch.cuda, name, _constant(value))
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event  # type: ignore[misc,assignment]
    torch.cuda.stream = _use_stream
    # Unpatched it queues the callback for a device that never comes.
    torch.cuda._lazy_call = lambda callback, **kwargs: callback()


def _answer_for_generator() -> None:
    generator = torch.default_generator
    torch.cuda.default_generators = {"cpu": generator, 0: generator}  # type: ignore[assignment]
    modules: tuple[Any, ...] = (torch.cuda, torch.cuda.random)
    for module in modules:
        module.manual_seed = lambda seed: generator.manual_seed(seed)
        module.manual_seed_all = lambda seed: generator.manual_seed(seed)
        module.get_rng_state = lambda *args, **kwargs: generator.get_state()
        module.set_rng_state = lambda state, *args: generator.set_state(state)
    # Device and host share one generator here, so the tracker's alarm about it is always raised and never true.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # pinning needs a device to pin for
        return factory(*args, **kwargs)

    return made


def _fill_gaps_of_gloo() -> None:
    collectives = dist.distributed_c10d
    isend, all_to_all_single = collectives.isend, dist.all_to_all_single

    # deallocate_pipeline_outputs frees the data of a tensor that gloo is still sending: hand gloo an alias.
    def isend_alias(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return isend(tensor.detach(), *args, **kwargs)

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    # megatron turns split sizes into lists only for tensors that say is_cuda.
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
