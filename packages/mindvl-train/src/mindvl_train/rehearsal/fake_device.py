# SPDX-License-Identifier: Apache-2.0
"""Device tensors without memory: a dispatch mode that runs device operators on fake tensors and host operators for real.

An operator is a device operator if an argument is a fake tensor or if it makes a tensor on the device. Its results have
shape, type, device and storage size, and no values. The shapes come from torch's FakeTensorMode at the first call with
the same arguments, and from a cache afterwards. Every collective goes to messages.py, every result to memory.py.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException
from torch.utils._python_dispatch import TorchDispatchMode

from mindvl_train.errors import TrainError
from mindvl_train.rehearsal.answers import number_of, numbers_of
from mindvl_train.rehearsal.memory import MemoryLog, ModuleStack
from mindvl_train.rehearsal.messages import MessageLog, Moment
from mindvl_train.rehearsal.operators import FREE, HOST_COPY, Cost, cost_of
from mindvl_train.rehearsal.record import WaitKind
from mindvl_train.rehearsal.sources import calling_line

# Operators of torch_npu without a shape rule -> the argument that the result is like.
_LIKE_ARGUMENT = {"npu::npu_format_cast": 0, "npu::npu_moe_gating_top_k_backward": 0}
# Results depend on more than the shapes of the arguments, or the metadata of an argument is changed.
_NOT_CACHED = (
    "aten::as_strided",
    "aten::set_",
    "aten::resize_",
    "aten::as_strided_",
    "aten::unsqueeze_",
    "aten::detach_",
)
_FACTORIES = frozenset(
    f"aten::{name}"
    for name in ("arange", "empty", "empty_strided", "eye", "full", "ones", "rand", "scalar_tensor", "zeros")
)
_REAL_BYTES = 1 << 20  # larger copies on a CPU are fake


@dataclass(frozen=True)
class _New:
    """A result with its own storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _View:
    """A result that shares the storage of an argument."""

    argument: int  # index among the tensors of the call
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # relative to that of the argument
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Same:
    """A result that is an argument."""

    argument: int


@dataclass(frozen=True)
class _Entry:
    """What a call gives, by its arguments."""

    results: tuple[Any, ...]
    kind: type | None  # list or tuple of the results; None: a single one
    cost: Cost


class FakeDevice(TorchDispatchMode):
    """Runs device operators on fake tensors.

    Args:
        device: The device that the rank believes to have.
    """

    def __init__(self, device: torch.device, at: Moment, memory: MemoryLog, messages: MessageLog) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.device, self.at, self.memory, self.messages = device, at, memory, messages
        self.modules = ModuleStack()
        self.is_building = True  # on a CPU: tensors that are made now are weights, buffers and optimizer states
        self.is_planning = False
        self.phase = 0
        self.counts: Counter[Any] = Counter()  # calls by operator
        self.costs: dict[Any, list[float]] = {}
        self.totals = [0.0, 0.0, 0.0]  # FLOPs, bytes read, bytes written
        self.waits: Counter[tuple[str, str, str, WaitKind]] = Counter()
        self.wait_bytes: Counter[tuple[str, str, str, WaitKind]] = Counter()
        self.sources: dict[Any, str] = {}  # operator: line of its first call
        self._on_cpu = device.type == "cpu"
        self._cache: dict[Any, _Entry] = {}
        self._handlers: dict[str, Callable[..., Any]] = {
            "aten::_local_scalar_dense": self._read,
            "aten::_to_copy": self._to_copy,
            "aten::copy_": self._copy,
        }
        with self.fake:
            self._attributes = dict(torch.empty(0, device=device).__dict__)

    def __enter__(self) -> Any:
        torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor(..., device=) fills the device below every mode
        return super().__enter__()

    def _dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer one operator; takes the place of __torch_dispatch__ below."""
        if func is torch.ops.prim.device.default:  # C++ asks for the device of a fake tensor
            return args[0]._fake_device
        if func is torch.ops.aten.record_stream.default:  # a note for the allocator, without a rule for fake tensors
            return None
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self.at.operator += 1
            return self.messages.answer(func, args)
        tensors: list[Tensor] = []
        key = _key(args, tensors)
        options = _key(tuple(kwargs.items()), tensors) if kwargs else ()
        is_fake = any(type(tensor) is not Tensor and isinstance(tensor, FakeTensor) for tensor in tensors)
        if not is_fake and not self._makes_device_tensor(func, args, kwargs):
            result = func(*args, **kwargs)
            if self._on_cpu:
                self._track(result, func)
            return result
        self.at.operator += 1
        handler = self._handlers.get(func._schema.name)
        if handler is not None:
            handled = handler(func, args, kwargs, is_fake)
            if handled is not None:
                return handled
        return self._call(func, args, kwargs, tensors, (func, key, options))

    def _makes_device_tensor(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operator without fake arguments makes a tensor of the device."""
        device = kwargs.get("device")
        if not self._on_cpu:
            return device is not None and torch.device(device).type == self.device.type
        if func._schema.name == "aten::_to_copy":
            dtype = kwargs.get("dtype") or args[0].dtype
            return bool(args[0].numel() * dtype.itemsize >= _REAL_BYTES)
        # On a CPU a name tells device from host only where a device is given. While the model is built all tensors of
        # its types are on the device.
        if func._schema.name not in _FACTORIES or self.is_planning:
            return False
        if device is not None or not self.is_building:
            return device is not None and torch.device(device).type == "cpu"
        return bool((kwargs.get("dtype") or torch.get_default_dtype()).is_floating_point)

    def _call(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], key: Any) -> Any:
        entry = self._cache.get(key)
        if entry is None:
            result = self._run(func, args, kwargs)
            entry = self._entry(func, args, kwargs, tensors, result)
            if func not in self.sources:
                self.sources[func] = calling_line(3)[0]
            if func._schema.name not in _NOT_CACHED:
                self._cache[key] = entry
            for each in result if isinstance(result, (list, tuple)) else (result,):
                self._track(each, func)
        else:
            made = [self._make(each, tensors, func) for each in entry.results]
            result = made[0] if entry.kind is None else entry.kind(made)
        self._count(func, entry.cost)
        return result

    def _count(self, func: Any, cost: Cost) -> None:
        self.counts[func] += 1
        if cost is FREE:
            return
        sums = self.costs.get(func)
        if sums is None:
            sums = self.costs[func] = [0.0, 0.0, 0.0]
        for index, value in enumerate((cost.flops, cost.bytes_read, cost.bytes_written)):
            sums[index] += value
            self.totals[index] += value

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.name == "aten::record_stream":  # tells an allocator, which does not exist
            return None
        like = _LIKE_ARGUMENT.get(func._schema.name)
        if like is not None:
            if func._schema.name == "npu::npu_format_cast":  # tensors have the plain format
                return args[like]
            with self.fake:
                return torch.empty_like(args[like])
        if func.is_view and isinstance(args[0], FakeTensor):  # on plain meta tensors, which takes a tenth of the time
            base = args[0]
            meta = func(
                _view(base, base.dtype, int(base.storage_offset()), base.shape, base.stride()), *args[1:], **kwargs
            )
            if isinstance(meta, Tensor):
                return self._wrap(meta, base._fake_device)
            return type(meta)(self._wrap(each, base._fake_device) for each in meta)
        try:
            with self.fake:
                return func(*args, **kwargs)
        except UnsupportedOperatorException as error:
            raise TrainError(
                f"{error.func}: has no shape rule for fake tensors, so it cannot be rehearsed. Register one with "
                "torch.library.register_fake, or choose another backend for the operator (ops.overrides)."
            ) from error

    def _entry(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], result: Any) -> _Entry:
        kind = type(result) if isinstance(result, (list, tuple)) else None
        results = result if kind is not None else (result,)
        place = {id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
        storages = {tensor.untyped_storage()._cdata: index for index, tensor in reversed(list(enumerate(tensors)))}
        found: list[Any] = []
        for each in results:
            if not isinstance(each, FakeTensor):
                found.append(each)
            elif id(each) in place:
                found.append(_Same(place[id(each)]))
            else:
                size, stride = tuple(each.shape), tuple(each.stride())
                number = storages.get(each.untyped_storage()._cdata)
                if number is None:
                    found.append(_New(size, stride, each.dtype, each._fake_device))
                else:
                    offset = int(each.storage_offset()) - int(tensors[number].storage_offset())
                    found.append(_View(number, size, stride, offset, each.dtype, each._fake_device))
        return _Entry(tuple(found), kind, cost_of(func, args, kwargs, result))

    def _make(self, each: Any, tensors: list[Tensor], func: Any) -> Any:
        if isinstance(each, _Same):
            return tensors[each.argument]
        if isinstance(each, _New):
            made = self._wrap(_strided(each.size, each.stride, dtype=each.dtype, device="meta"), each.device)
            self._track(made, func)
            return made
        if isinstance(each, _View):
            base = tensors[each.argument]
            offset = int(base.storage_offset()) + each.offset
            return self._wrap(_view(base, each.dtype, offset, each.size, each.stride), each.device)
        return each

    def _wrap(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """FakeTensor(meta, device), without the checks of its constructor."""
        made = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
        made.__dict__.update(self._attributes)
        if device is not self.device:
            made.__dict__["_fake_device"] = device
        return made

    def _track(self, result: Any, func: Any) -> None:
        if isinstance(result, (list, tuple)):
            for each in result:
                self._track(each, func)
        elif isinstance(result, Tensor):
            if isinstance(result, FakeTensor) and result._fake_device.type != self.device.type:
                return
            if self.memory.add(result, self.modules.category, self.at.operator, self.phase, func._schema.name):
                self.memory.set_source(calling_line(3)[0])

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """New tensors have values inside the block, also on a CPU, where no device tells host from device."""
        before, self.is_planning = self.is_planning, True
        try:
            yield
        finally:
            self.is_planning = before

    def wait(self, kind: WaitKind, name: str, num_bytes: int, depth: int = 3) -> None:
        """Note that the host waits for the device, or for a copy from pageable memory; a CPU has no device."""
        if self._on_cpu:
            return
        place = (*calling_line(depth + 1), name, kind)
        self.waits[place] += 1
        self.wait_bytes[place] += num_bytes

    def _read(self, func: Any, args: Any, kwargs: Any, is_fake: bool) -> Any:
        self.wait("read", func._schema.name, args[0].itemsize)
        return number_of(args[0])

    def tolist(self, value: FakeTensor) -> Any:
        """FakeTensor.tolist: one wait for the whole array."""
        self.wait("read", "aten::_to_copy", value.numel() * value.itemsize)
        return numbers_of(value) if value.ndim else number_of(value)

    def _to_copy(self, func: Any, args: Any, kwargs: Any, is_fake: bool) -> Any:
        value, dtype = args[0], kwargs.get("dtype") or args[0].dtype
        target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        size = value.numel() * dtype.itemsize
        if is_fake and target == "cpu" and not self._on_cpu:
            self.counts[func] += 1
            if not kwargs.get("non_blocking", False):
                self.wait("copy to host", func._schema.name, size)
            return torch.zeros(value.shape, dtype=dtype)
        if is_fake:
            return None
        if not self._on_cpu and not kwargs.get("non_blocking", False):
            self.wait("blocking copy to device", func._schema.name, size)
        self.counts[func] += 1
        made = self._wrap(_strided(value.shape, value.stride(), dtype=dtype, device="meta"), self.device)
        if value.ndim == 1 and dtype == torch.int32:  # cumulative lengths, by which attention is counted
            made.__dict__[HOST_COPY] = value
        self._track(made, func)
        return made

    def _copy(self, func: Any, args: Any, kwargs: Any, is_fake: bool) -> Any:
        to, source = args[0], args[1]
        if self._on_cpu or isinstance(to, FakeTensor) == isinstance(source, FakeTensor):
            return None if isinstance(to, FakeTensor) else to
        self.counts[func] += 1
        non_blocking = (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)) or source.numel() == 1
        if not non_blocking:
            kind: WaitKind = "copy to host" if isinstance(source, FakeTensor) else "blocking copy to device"
            self.wait(kind, func._schema.name, source.numel() * source.itemsize)
        return to


# torch wraps the method of every mode so that torch.compile ignores it, which takes longer than the method.
FakeDevice.__torch_dispatch__ = FakeDevice._dispatch  # type: ignore[method-assign,assignment]

# The functions of torch itself: on an NPU and on a CPU the device setup replaces those of the module.
_strided = torch._C._VariableFunctions.empty_strided
_empty = torch._C._VariableFunctions.empty


def _view(base: Tensor, dtype: torch.dtype, offset: int, size: Any, stride: Any) -> Tensor:
    """A plain meta tensor on the storage of a fake tensor."""
    meta = _empty(0, dtype=dtype, device="meta")
    meta.set_(base.untyped_storage(), offset, size, stride)
    return meta


def _key(values: Sequence[Any], tensors: list[Tensor]) -> tuple[Any, ...]:
    """A hashable description of arguments; their tensors are appended to `tensors`."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            is_fake = type(value) is not Tensor and isinstance(value, FakeTensor)
            found.append(
                (value.shape, value.stride(), value.dtype, value.__dict__["_fake_device"] if is_fake else None)
            )
        elif isinstance(value, (list, tuple)):
            found.append(_key(value, tensors))
        else:
            found.append((type(value), value))
    return tuple(found)
