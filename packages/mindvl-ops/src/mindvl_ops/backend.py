# SPDX-License-Identifier: Apache-2.0
"""Choose the implementation of every operator, explicitly and for the whole process.

Comes after the registry is filled, before the first model call. There is no silent fallback: a
backend that lacks an operator is an error; `auto` looks at the kind of device; `backend_table` says
what runs and why not the others.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from . import registry
from .config import BackendName, OpsConfig
from .errors import OpsError
from .npu import extension
from .runtime.start import device_kind
from .triton_backend import installed

_DEFAULT = OpsConfig(backend="torch")
_chosen_config: OpsConfig = _DEFAULT
_chosen: dict[str, registry.Operator] = {}


@dataclass(frozen=True, kw_only=True)
class BackendRow:
    """One line of the table that is logged at start."""

    operator: str
    chosen: str
    why_not: dict[str, str]  # every other backend -> reason


def select_backends(config: OpsConfig, device_type: str | None = None) -> None:
    """Make `config` the choice of this process.

    Args:
        device_type: What backend `auto` is for: "npu", "cuda" or "cpu"; None: what the device files of this host say.

    Raises:
        UnknownBackend: An override names no operator, or the backend lacks the operator.
        OpsError: The npu backend is asked for where no NPU can be used, or triton where it is not installed.
    """
    global _chosen_config, _chosen
    if config.backend == "auto":
        config = _for_device(config, device_type or device_kind())
    for operator in config.overrides:
        registry.backends_of(operator)  # an unknown name raises and lists what exists
    wanted = {operator: _backend_for(config, operator) for operator in registry.operators()}
    functions = {operator: registry.lookup(operator, backend) for operator, backend in wanted.items()}
    if "npu" in wanted.values() and (reason := extension.why_not()) is not None:
        raise OpsError(f"ops: backend npu: {reason}. Choose backend torch, or see `mindvl doctor`.")
    if "triton" in wanted.values() and (reason := installed.why_not()) is not None:
        raise OpsError(f"ops.overrides: backend triton: {reason}. Install it, or choose backend torch.")
    _chosen, _chosen_config = functions, config


def _for_device(config: OpsConfig, device_type: str) -> OpsConfig:
    """What `auto` means on a device. The table of operators shows it, and the reason where triton is not installed."""
    if device_type == "npu":
        return replace(config, backend="npu")
    fused: dict[str, BackendName] = {}
    if device_type == "cuda" and installed.why_not() is None:
        fused = dict.fromkeys(
            (name for name in registry.operators() if "triton" in registry.backends_of(name)), "triton"
        )
    return replace(config, backend="torch", overrides={**fused, **config.overrides})


def configuration() -> OpsConfig:
    """The choice of this process."""
    return _chosen_config


@contextmanager
def use_backend(backend: BackendName, *operators: str) -> Iterator[None]:
    """Run a block with another backend, for all operators that have it or only the named ones; the earlier choice comes back."""
    before = _chosen_config
    if operators or backend == "triton":  # triton kernels exist for some operators only
        named = operators or tuple(name for name in registry.operators() if backend in registry.backends_of(name))
        only: dict[str, BackendName] = dict.fromkeys(named, backend)
        config = replace(before, overrides={**before.overrides, **only})
    else:
        config = replace(before, backend=backend, overrides={})
    select_backends(config)
    try:
        yield
    finally:
        select_backends(before)


def chosen(operator: str) -> registry.Operator:
    """The function that runs for `operator` now.

    The type of the tensors decides in which type an operator computes, on every backend: inside of an autocast region
    it runs with autocast off, because some kernels would follow autocast and others would not.
    """
    function = _chosen.get(operator)
    if function is None:  # first use without select_backends: the documented default
        function = _chosen[operator] = registry.lookup(operator, _backend_for(_chosen_config, operator))
    return partial(_without_autocast, function) if torch._C._is_any_autocast_enabled() else function


def _without_autocast(function: registry.Operator, *arguments: Any, **options: Any) -> Any:
    device_types = {argument.device.type for argument in arguments if isinstance(argument, torch.Tensor)}
    with ExitStack() as stack:
        for device_type in device_types:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        return function(*arguments, **options)


def backend_table() -> list[BackendRow]:
    """What runs for each operator, and why the other backends do not."""
    no_npu = extension.why_not()  # queried once: a wheel without its libraries takes a while to fail
    return [_row(operator, no_npu) for operator in registry.operators()]


def _row(operator: str, no_npu: str | None) -> BackendRow:
    name = _backend_for(_chosen_config, operator)
    others = {backend: _why_not(operator, backend, no_npu) for backend in registry.BACKENDS if backend != name}
    return BackendRow(operator=operator, chosen=name, why_not=others)


def _backend_for(config: OpsConfig, operator: str) -> str:
    return config.overrides.get(operator, config.backend)


def _why_not(operator: str, backend: str, no_npu: str | None) -> str:
    if backend not in registry.backends_of(operator):
        return "not implemented"
    if backend == "npu" and no_npu is not None:
        return no_npu
    if backend == "triton" and (reason := installed.why_not()) is not None:
        return reason
    name = _backend_for(_chosen_config, operator)
    if name == "triton":  # by the device or by an override
        return "the Triton kernel is chosen"
    return f"{'override' if operator in _chosen_config.overrides else 'configuration'} asks for {name}"
