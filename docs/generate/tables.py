# SPDX-License-Identifier: Apache-2.0
"""Reference tables of operators, devices, model sizes and index files, from the tables that the code itself uses.

Comes before stage.py.
"""

import ast
import inspect
import io
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import fields

import numpy as np

import mindvl_ops
from mindvl_data.shards import index_format
from mindvl_model.sizes import NAMED_SIZES
from mindvl_ops.registry import BACKENDS, backends_of, operators
from mindvl_train.devices import DEVICES

TYPES = {"u": "uint", "i": "int", "f": "float"}


def operator_table() -> str:
    """Every operator with the first sentence of its contract and its backends."""
    rows = []
    for name in operators():
        public = getattr(mindvl_ops, name, None) or mindvl_ops.AdamW
        summary = inspect.cleandoc(public.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        has = backends_of(name)
        rows.append((f"`{name}`", summary, *("yes" if backend in has else "no" for backend in BACKENDS)))
    return _table(("operator", "contract", *(f"`{backend}`" for backend in BACKENDS)), rows)


def device_table() -> str:
    """Peak figures that MFU and the layout search use."""
    names = [field.name for field in fields(DEVICES[0])]
    return _table([f"`{name}`" for name in names], [[str(getattr(one, name)) for name in names] for one in DEVICES])


def size_table() -> str:
    """The named model sizes of `model.size`."""
    rows = []
    for name, config in NAMED_SIZES.items():
        vision, language = config.vision, config.language
        rows.append(
            (
                f"`{name}`",
                f"{vision.num_layers} layers of {vision.hidden_size}",
                f"`{language.family}`, {language.num_layers} layers of {language.hidden_size}",
                f"{language.vocab_size:,}",
            )
        )
    return _table(("`model.size`", "vision encoder", "language model", "vocabulary"), rows)


def index_sample_table() -> str:
    """One sample in an index file."""
    return _dtype_table(index_format.SAMPLE_DTYPE, "SAMPLE_DTYPE")


def index_member_table() -> str:
    """One member of a sample in an index file."""
    return _dtype_table(index_format.MEMBER_DTYPE, "MEMBER_DTYPE")


def _dtype_table(dtype: np.dtype, constant: str) -> str:
    meanings = _comments_of_fields(constant)
    assert dtype.fields is not None
    rows = []
    for name, (kind, offset, *_) in dtype.fields.items():
        rows.append((str(offset), f"{TYPES[kind.kind]}{8 * kind.itemsize}", f"`{name}`", meanings.get(name, "")))
    return _table(("offset", "type", "field", "meaning"), rows)


def _comments_of_fields(constant: str) -> dict[str, str]:
    """Comment behind each `("name", "type")` of the list that makes a numpy type."""
    source = inspect.getsource(index_format)
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == constant:
            entries = [part for part in ast.walk(node.value) if isinstance(part, ast.Tuple)]
            return {ast.literal_eval(entry)[0]: comments.get(entry.end_lineno or 0, "") for entry in entries}
    raise AssertionError(f"{constant} is not in {index_format.__name__}")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
