# SPDX-License-Identifier: Apache-2.0
"""What the operators of the simulator ask about the running simulation, and how they refuse a call."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...errors import OpsError
from .calls import Call
from .strict import Strict


class RefusedError(RuntimeError):
    """The host check or the kernel would refuse this call; a RuntimeError, as on the device."""


@dataclass
class Simulation:
    """One run of the simulator."""

    strict: Strict
    calls: list[Call] = field(default_factory=list)
    syncs: list[str] = field(default_factory=list)  # what copied to the host, in order
    inside: int = 0  # > 0 while an operator computes: its own reads of values are not the caller's


_running: list[Simulation] = []


@contextmanager
def running(simulation: Simulation) -> Iterator[None]:
    """Make `simulation` the one that operators report to."""
    _running.append(simulation)
    try:
        yield
    finally:
        _running.remove(simulation)


def current() -> Simulation:
    """The running simulation.

    Raises:
        OpsError: None is running.
    """
    if not _running:
        raise OpsError(
            "mindvl_ops.testing.fake_npu: the simulated NPU is not running. Use the fixture fake_npu, or `with "
            "simulate():`."
        )
    return _running[-1]


def strict() -> Strict:
    """The flags of the running simulation."""
    return current().strict


@contextmanager
def inside() -> Iterator[None]:
    """Mark that an operator computes."""
    simulation = current()
    simulation.inside += 1
    try:
        yield
    finally:
        simulation.inside -= 1


def refuse(wrong: bool, message: str) -> None:
    """Raise `message` if `wrong`.

    Raises:
        RefusedError: `wrong` is true.
    """
    if wrong:
        raise RefusedError(message)
