# SPDX-License-Identifier: Apache-2.0
"""Turn a table of operators into real PyTorch operators under `torch.ops.npu`.

Binding by schema, its error messages and the warning about a missing autograd kernel are PyTorch's own, the same code
that serves the wheel. An operator is declared by its values (plain PyTorch, differentiable), its rules, and what the
wheel knows of its derivative: a formula, an error at backward, or nothing at all.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import OpsError
from . import state
from .calls import Call
from .schemas import SCHEMAS

Derivative = Literal["formula", "raises", "missing"]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One overload of one operator."""

    name: str
    values: Callable[..., Any]  # arguments by name -> outputs
    rules: Callable[..., None] | None
    derivative: Derivative
    learns: tuple[str, ...]  # arguments that get a gradient
    carries: tuple[int, ...]  # outputs that carry a gradient function
    uses: tuple[int, ...]  # outputs whose gradient the backward reads


_OPERATORS: dict[str, Operator] = {}
_library: torch.library.Library | None = None


def operator(
    name: str,
    *,
    rules: Callable[..., None] | None = None,
    learns: tuple[str, ...] = (),
    derivative: Derivative | None = None,
    carries: tuple[int, ...] = (0,),
    uses: tuple[int, ...] | None = None,
) -> Callable[[F], F]:
    """Decorator that declares a function as the values of operator `name`."""

    def enter(values: F) -> F:
        _OPERATORS[name] = Operator(
            name=name,
            values=values,
            rules=rules,
            derivative=derivative or ("formula" if learns else "missing"),
            learns=learns,
            carries=carries,
            uses=carries if uses is None else uses,
        )
        return values

    return enter


def names() -> tuple[str, ...]:
    """Names of all overloads, in the order of the schemas."""
    return tuple(schema.split("(")[0] for schema in SCHEMAS)


def declared(name: str) -> Operator:
    """What is declared of one overload."""
    return _OPERATORS[name]


def register_all() -> None:
    """Enter every operator under `torch.ops.npu`, once per process.

    Raises:
        OpsError: The real torch_npu is loaded in this process.
    """
    global _library
    if _library is not None:
        return
    if "torch_npu" in sys.modules:
        raise OpsError(
            "mindvl_ops.testing.fake_npu: the real torch_npu is loaded. Run the simulator in a process without it."
        )
    library = torch.library.Library("npu", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
        entry = declared(schema.split("(")[0])
        library.impl(entry.name, _kernel(entry, _plain), "CPU")
        if entry.derivative == "formula":
            library.impl(entry.name, _kernel(entry, _with_formula), "AutogradCPU")
        elif entry.derivative == "raises":
            library.impl(entry.name, _kernel(entry, _with_error), "AutogradCPU")
    _library = library  # unregisters everything when it goes away


def overload(name: str) -> Any:
    """The OpOverload of a name such as npu_swiglu or npu_apply_adam_w.out."""
    packet, _, rest = name.partition(".")
    return getattr(getattr(torch.ops.npu, packet), rest or "default")


def _kernel(entry: Operator, run: Callable[[Operator, dict[str, Any]], Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        arguments = _bound(entry.name, args, kwargs)
        outputs = None
        try:
            with state.inside():
                if entry.rules is not None:
                    entry.rules(**arguments)
                outputs = run(entry, arguments)
        finally:  # refused calls are kept too
            state.current().calls.append(Call.of(entry.name, arguments, outputs))
        return outputs

    return kernel


def _bound(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name; the dispatcher leaves defaults out."""
    schema = overload(name)._schema.arguments
    arguments = {argument.name: argument.default_value for argument in schema}
    arguments.update(zip((argument.name for argument in schema), args, strict=False))
    arguments.update(kwargs)
    return arguments


def _plain(entry: Operator, arguments: dict[str, Any]) -> Any:
    with torch.no_grad():
        return entry.values(**arguments)


def _with_formula(entry: Operator, arguments: dict[str, Any]) -> Any:
    _check_constants(entry, arguments)
    leaves = [arguments[name] for name in entry.learns]
    return _node(entry.name, _FormulaNode).apply(entry, arguments, *leaves)


def _with_error(entry: Operator, arguments: dict[str, Any]) -> Any:
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    return _ErrorNode.apply(entry, arguments, *tensors)


class _FormulaNode(torch.autograd.Function):
    """Backward by autograd through the same values again."""

    @staticmethod
    def forward(ctx: Any, entry: Operator, arguments: dict[str, Any], *leaves: Tensor | None) -> Any:
        outputs = entry.values(**arguments)
        rest = [
            output
            for index, output in enumerate(outputs if isinstance(outputs, tuple) else (outputs,))
            if isinstance(output, Tensor) and index not in entry.carries
        ]
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*leaves)
        ctx.entry = entry
        ctx.arguments = {name: value for name, value in arguments.items() if name not in entry.learns}
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        entry: Operator = ctx.entry
        with state.inside(), torch.enable_grad():
            _check_unused(entry, grads)
            wanted = ctx.needs_input_grad[2:]
            leaves = [
                tensor if tensor is None else tensor.detach().requires_grad_(needed)
                for tensor, needed in zip(ctx.saved_tensors, wanted, strict=True)
            ]
            outputs = entry.values(**ctx.arguments, **dict(zip(entry.learns, leaves, strict=True)))
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            used = [index for index in entry.uses if grads[index] is not None]
            learned = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            found = iter(
                torch.autograd.grad(
                    [outputs[index] for index in used], learned, [grads[index] for index in used], allow_unused=True
                )
                if used
                else [None] * len(learned)
            )
        return None, None, *(next(found) if needed else None for needed in wanted)


class _ErrorNode(torch.autograd.Function):
    """Forward works; backward raises what the wheel raises."""

    @staticmethod
    def forward(ctx: Any, entry: Operator, arguments: dict[str, Any], *tensors: Tensor) -> Any:
        ctx.operator = entry.name
        return entry.values(**arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(f"derivative for npu::{ctx.operator} is not implemented")


_nodes: dict[str, type[torch.autograd.Function]] = {}


def _node(name: str, kind: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """A node class that carries the operator's name, as in the wheel: NpuRmsNormBackward."""
    if name not in _nodes:
        camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
        _nodes[name] = type(camel, (kind,), {})
    return _nodes[name]


def _check_constants(entry: Operator, arguments: dict[str, Any]) -> None:
    """The wheel refuses a gradient where its formula has none, before it computes; `rotate` alone slips through."""
    for name, value in arguments.items():
        wants = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
        state.refuse(
            wants and name not in (*entry.learns, "rotate"),
            f"The function '{entry.name}' is not differentiable with respect to argument '{name}'. This input cannot "
            "have requires_grad True.",
        )


def _check_unused(entry: Operator, grads: tuple[Tensor | None, ...]) -> None:
    ignored = [index for index in entry.carries if index not in entry.uses and grads[index] is not None]
    state.refuse(
        bool(ignored) and state.strict().unused_outputs,
        f"{entry.name}: a gradient reaches output {ignored}, which the backward ignores; use output "
        f"{list(entry.uses)} alone",
    )
