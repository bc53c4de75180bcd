# SPDX-License-Identifier: Apache-2.0
"""Values of arithmetic expressions in answers, without running them.

VLMEvalKit and lmms-eval pass answers to Python's eval; here the syntax tree is walked, and only numbers, operators and
a few functions of numbers have a meaning. Used by mathematics.py.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

MAX_BITS = 4096  # of an integer result; larger powers and shifts have no value
MAX_LENGTH = 1000  # characters of an expression
_MAX_DEPTH = 300

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitXor: operator.xor,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
PYTHON_NAMES: dict[str, Any] = {
    "abs": abs, "round": round, "min": min, "max": max, "int": int, "float": float, "complex": complex,
}  # fmt: skip
MATH_NAMES: dict[str, Any] = PYTHON_NAMES | {
    name: getattr(math, name)
    for name in (
        "pi", "e", "tau", "inf", "nan", "sqrt", "cbrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin",
        "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "floor", "ceil", "fabs", "degrees",
        "radians", "hypot", "pow", "gcd", "lcm", "trunc", "erf", "gamma",
    )
}  # fmt: skip


class NoValueError(ValueError):
    """A text is not arithmetic, or too long, too deeply nested or too large; an answer in it is compared as text only."""


def value_of(text: str, names: Mapping[str, Any]) -> Any:
    """Value of an arithmetic expression.

    Args:
        names: Values and functions that may be used.

    Raises:
        NoValueError: It is not arithmetic, or its value is too large; ArithmeticError and TypeError as in Python.
    """
    if len(text) > MAX_LENGTH:
        raise NoValueError
    try:
        tree = ast.parse(text.lstrip(" \t"), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise NoValueError from error
    return _value(tree.body, names, 0)


def _value(node: ast.expr, names: Mapping[str, Any], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise NoValueError
    match node:
        case ast.Constant(value=int() | float() | complex() as number):
            return _limited(number)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_value(operand, names, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _binary(op, _value(left, names, depth + 1), _value(right, names, depth + 1))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return _COMPARE[type(op)](_value(left, names, depth + 1), _value(right, names, depth + 1))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if callable(names.get(name)):
            return _limited(names[name](*(_value(argument, names, depth + 1) for argument in arguments)))
    raise NoValueError


def _binary(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Pow | ast.LShift) and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if isinstance(op, ast.Pow) else left.bit_length() + right
        if bits > MAX_BITS:
            raise NoValueError
    return _limited(_BINARY[type(op)](left, right))


def _limited(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise NoValueError
    return value
