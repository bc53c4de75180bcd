# SPDX-License-Identifier: Apache-2.0
"""Chat template (Jinja source) -> function that renders it, with bounded work.

Comes with the tokenizer, used by chat.py. A template is untrusted code. It runs in Jinja's sandbox with the filters and
functions of transformers, and the work of every loop, macro, call and string is counted: a template that does not
terminate or grows without bound is refused. The limits are counts and not seconds, so that every rank and machine
refuses the same samples.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mindvl_data.errors import DataError

MOST_WORK = 200_000_000  # characters created or read while a conversation is rendered
MOST_TEXT = 64_000_000  # characters of one string; a record has at most 8,000,000 bytes
MOST_ITEMS = 1_000_000  # of one list
_LOOP_WORK = 40  # cost of a loop iteration in characters, by its running time
_CALL_WORK = 400  # cost of a call in characters
_LARGEST_NUMBER = 100_000  # limit of numbers passed to functions, such as the width of `center`
_COUNTED_BINARY = frozenset(("+", "*", "**", "%"))

_PASSED = (
    jinja2.Environment,
    jinja2.runtime.Context,
    nodes.EvalContext,
)  # first argument of some filters

Render = Callable[..., str]


def compile_template(source: str) -> Render:
    """Compile a template into a function that renders it from keyword arguments.

    The function raises any error of the template, and jinja2.TemplateError if the work exceeds MOST_WORK.

    Raises:
        DataError: The source is not a Jinja template.
    """
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    _WORK.left = MOST_WORK  # constants are evaluated during compilation
    try:
        template = environment.from_string(_Counting().visit(environment.parse(source)))
    except Exception as error:  # syntax errors, and RecursionError for deep nesting
        raise DataError(
            f"data.tokenizer: the chat template cannot be compiled: {error}. Correct the template."
        ) from error

    def render(**values: Any) -> str:
        _WORK.left = MOST_WORK
        return _joined(template.generate(**values))

    return render


class _Left(threading.local):
    """Remaining work of the rendering in this thread."""

    left = MOST_WORK


_WORK = _Left()


def _spend(amount: int) -> None:
    _WORK.left -= amount
    if _WORK.left < 0:
        raise jinja2.TemplateError("the template does too much work, or does not terminate")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 1


def _made(value: Any) -> Any:
    """Count the size of a new value and return it."""
    size = _size(value)
    if size > (MOST_TEXT if isinstance(value, str) else MOST_ITEMS):
        raise jinja2.TemplateError(f"the template creates a text or a list of {size} characters or items")
    _spend(size)
    return value


def _read_whole(value: Any) -> Any:
    """Count a value with everything it contains, including repeated parts, and return it."""
    _spend(_LOOP_WORK if not isinstance(value, str) else len(value))
    for inner in value.items() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _read_whole(inner)
    return value


def _joined(pieces: Iterable[str]) -> str:
    texts, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > MOST_TEXT:
            raise jinja2.TemplateError(f"the template renders more than {MOST_TEXT} characters")
        texts.append(piece)
    return "".join(texts)


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
            raise jinja2.TemplateError(f"the template calls a function with the number {str(value)[:20]}")


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter or test so that its arguments and result are counted."""

    name = function.__name__.removeprefix("do_").removeprefix("sync_do_").lstrip("_")

    @wraps(function)
    def counting(*values: Any, **named: Any) -> Any:
        _check_numbers((*values[1:], *named.values()))
        _spend(_LOOP_WORK + sum(map(_size, values)))
        _check_growth(name, [value for value in values if not isinstance(value, _PASSED)], named)
        return _made(function(*values, **named))

    return counting


def _check_growth(name: str, values: list[Any], named: dict[str, Any]) -> None:
    """Count the result of functions whose result is larger than their arguments before it is created."""
    if name in ("tojson", "string", "soft_str", "pprint", "urlencode", "xmlattr", "join", "sum"):
        for value in (*values, *named.values()):
            _read_whole(value)
    if name == "join" and len(values) > 1:
        separator = sum(len(value) for value in (*values[1:], *named.values()) if isinstance(value, str))
        _spend(separator * _size(values[0]))
    if name == "replace":
        texts = [value for value in (*values, *named.values()) if isinstance(value, str)]
        if len(texts) > 2 and texts[0].count(texts[1]) * len(texts[2]) > MOST_TEXT:
            raise jinja2.TemplateError("the template replaces a text by one that is too long")
    if name == "format" and values and isinstance(values[0], str):
        _check_format(values[0])


class _Each:
    """An iterable that counts the iterations over it."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            _spend(_LOOP_WORK)
            yield value

    def __len__(self) -> int:
        return len(self._values)


# With a context, so that Jinja does not evaluate them during compilation.
@pass_context
def _each(_: Any, values: Any) -> _Each:
    iter(values)  # raises Jinja's error for values that are not iterable
    return _Each(values)


@pass_context
def _count(_: Any, value: Any) -> Any:
    return _read_whole(value) if isinstance(value, list | tuple | dict) else _made(value)


@pass_context
def _copied(_: Any, value: Any) -> Any:
    return _made(value)


@pass_context
def _step(_: Any, amount: int) -> str:
    _spend(amount)
    return ""


class _Counting(NodeTransformer):
    """Inserts the counting filters into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - named after the node
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_each")
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.node, nodes.Name) and node.node.name == "loop":  # a recursive loop
            node.args = [_filtered(argument, "_each") for argument in node.args]
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _spending(_CALL_WORK, node.lineno))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _spending(_CALL_WORK, node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_filtered(child, "_count") for child in node.nodes]
        return _filtered(node, "_count")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_copied") if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_count")
        return node

    def visit_Output(self, node: nodes.Output) -> Any:  # noqa: N802
        self.generic_visit(node)
        plain = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        node.nodes = [c if isinstance(c, nodes.TemplateData) else _filtered(c, "_count") for c in node.nodes]
        return [_spending(plain, node.lineno), node] if plain > _LOOP_WORK else node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _spending(amount: int, line: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filtered(nodes.Const(amount, lineno=line), "_step"), lineno=line)


class _GenerationTag(Extension):
    """The tag `{% generation %}` of transformers: its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's form

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, which could escape the sandbox."""

    def __init__(*arguments: Any, **values: Any) -> None:
        self, *rest = arguments
        attributes = dict(*rest, **values)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateError(f"the template stores {name!r}, and names must not begin with an underscore")


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of transformers for chat templates, with counting."""

    intercepted_binops = _COUNTED_BINARY

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        filters: dict[str, Any] = {**self.filters, "tojson": _tojson}
        tests: dict[str, Any] = dict(self.tests)
        self.filters = {name: _counted(function) for name, function in filters.items()}
        self.filters |= {"_each": _each, "_count": _count, "_copied": _copied, "_step": _step}
        self.tests = {name: _counted(function) for name, function in tests.items()}
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self.globals["dict"] = lambda *values, **named: dict(*values, **named)  # not the type, which has methods
        self.globals["namespace"] = _Namespace

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Count an operation; refuse it before evaluation if its result would be too large."""
        if operator == "*" and (_size(left) > 1 or _size(right) > 1):
            times = right if isinstance(right, int) else left
            if isinstance(times, int) and times * max(_size(left), _size(right)) > MOST_TEXT:
                raise jinja2.TemplateError("the template repeats a text too often")
        if operator in ("*", "**"):
            _check_numbers(value for value in (left, right) if not isinstance(value, str | list | tuple))
        if operator == "**" and isinstance(right, int) and right > 64:
            raise jinja2.TemplateError(f"the template computes a power of {right}")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            _read_whole(right)
            _check_numbers(right if isinstance(right, tuple) else (right,))
        return _made(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *values: Any, **named: Any) -> Any:
        """Count a call of a function or method."""
        _check_numbers((*values, *named.values()))
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        _spend(_CALL_WORK + _size(owner) + sum(map(_size, values)))
        if isinstance(owner, str):
            name = getattr(method, "__name__", "").removesuffix("_map")
            given = [values[0], owner] if name == "join" and values else [owner, *values]
            _check_growth(name, given, named)
        return _made(super().call(context, function, *values, **named))


def _check_format(text: str) -> None:
    """Refuse formats with a width of more than five digits."""
    digits = 0
    for character in text:
        digits = digits + 1 if character.isdigit() else 0
        if digits > 5:
            raise jinja2.TemplateError("the template formats a number with a width of more than five digits")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The `tojson` of transformers; Jinja's own version escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
