# SPDX-License-Identifier: Apache-2.0
"""The simulated torch_npu: a module with the wheel's operators that replaces torch_npu in mindvl_ops."""

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ...npu import extension
from . import formats, operators, state
from .calls import Call
from .optimisers import NpuFusedAdamW
from .schemas import VERSION
from .strict import Strict
from .sync import count_syncs


class FakeNpu:
    """What a test holds while the simulation runs."""

    def __init__(self, simulation: state.Simulation) -> None:
        self._simulation = simulation
        self.torch_npu = _module(simulation)

    @property
    def calls(self) -> list[Call]:
        """Every operator call so far, in order."""
        return self._simulation.calls

    @property
    def syncs(self) -> list[str]:
        """What made the host wait so far, in order."""
        return self._simulation.syncs

    @contextmanager
    def relaxed(self, **flags: bool) -> Iterator[None]:
        """Switch flags of `Strict` for a block: `relaxed(masked_row=False)`."""
        before = self._simulation.strict
        self._simulation.strict = dataclasses.replace(before, **flags)
        try:
            yield
        finally:
            self._simulation.strict = before

    @contextmanager
    def as_torch_npu(self) -> Iterator[ModuleType]:
        """Let `import torch_npu` find the simulator."""
        before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torch_npu"}
        sys.modules.update({"torch_npu": self.torch_npu, "torch_npu.npu": self.torch_npu.npu})
        try:
            yield self.torch_npu
        finally:
            del sys.modules["torch_npu"], sys.modules["torch_npu.npu"]
            sys.modules.update(before)


@contextmanager
def simulate(strict: Strict | None = None) -> Iterator[FakeNpu]:
    """Use the simulator in place of torch_npu inside the block.

    Raises:
        OpsError: The real torch_npu is loaded in this process.
    """
    operators.register_all()
    simulation = state.Simulation(strict or Strict())
    fake = FakeNpu(simulation)
    with state.running(simulation), extension.replaced_by(fake.torch_npu), count_syncs(simulation):
        yield fake


class _TorchNpu(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name in _PACKETS:
            return getattr(torch.ops.npu, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


_PACKETS = frozenset(name.partition(".")[0] for name in operators.names())


def _module(simulation: state.Simulation) -> Any:
    module: Any = _TorchNpu("torch_npu", "Simulated torch_npu: CPU tensors stand for tensors on the device.")
    module.__spec__ = ModuleSpec("torch_npu", None)
    module.__path__ = []
    module.__version__ = VERSION
    module.Format = formats.Format
    module.get_npu_format = formats.format_of
    module.optim = SimpleNamespace(NpuFusedAdamW=NpuFusedAdamW)
    npu: Any = ModuleType("torch_npu.npu")
    npu.is_available = lambda: True
    npu.device_count = lambda: 1
    npu.current_device = lambda: 0
    npu.get_device_name = lambda device=None: "Ascend910B3"
    npu.synchronize = lambda device=None: simulation.syncs.append("synchronize")
    npu.config = SimpleNamespace(allow_internal_format=False)
    module.npu = npu
    return module
