# SPDX-License-Identifier: Apache-2.0
"""The one table of operators: operator and backend -> function.

Modules register their functions here when they are imported, which is all that happens on import; `backend.py` chooses
among the entries.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from .errors import UnknownBackend

Operator = Callable[..., Any]
F = TypeVar("F", bound=Operator)

BACKENDS = ("reference", "torch", "triton", "npu")

_ENTRIES: dict[str, dict[str, Operator]] = {}


def register(operator: str, backend: str) -> Callable[[F], F]:
    """Decorator that registers a function as the implementation of `operator` for `backend`."""
    assert backend in BACKENDS, backend

    def enter(function: F) -> F:
        _ENTRIES.setdefault(operator, {})[backend] = function
        return function

    return enter


def operators() -> tuple[str, ...]:
    """Names of all operators, sorted."""
    return tuple(sorted(_ENTRIES))


def backends_of(operator: str) -> tuple[str, ...]:
    """Backends that implement `operator`, in the order of `BACKENDS`."""
    _check_operator(operator)
    return tuple(backend for backend in BACKENDS if backend in _ENTRIES[operator])


def lookup(operator: str, backend: str) -> Operator:
    """The function registered for `operator` and `backend`.

    Raises:
        UnknownBackend: The pair is not registered; the message lists what is.
    """
    _check_operator(operator)
    function = _ENTRIES[operator].get(backend)
    if function is None:
        raise UnknownBackend(
            f"ops: {operator}: backend {backend!r} has no {operator!r}. Use one of {', '.join(backends_of(operator))}."
        )
    return function


def _check_operator(operator: str) -> None:
    if operator not in _ENTRIES:
        raise UnknownBackend(
            f"ops: {operator}: operator {operator!r} does not exist. Use one of {', '.join(operators())}."
        )
