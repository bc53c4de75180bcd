# SPDX-License-Identifier: Apache-2.0
"""Check that the models of a merge have one architecture and compatible configurations.

Comes after all directories were opened, before anything is written. A difference that affects the result is refused,
any other is returned as a warning; values are checked while they are read (run.py).
"""

from collections.abc import Sequence

from .config import MergeConfig
from .differences import Difference, code_differences, config_differences, processor_differences
from .directory import ModelDirectory
from .errors import DirectoryError
from .tokenizers import tokenizer_differences

_NAMED_IN_MESSAGE = 6


def check_parents(config: MergeConfig, directories: Sequence[ModelDirectory]) -> list[str]:
    """Compare every model with the first; returns one warning for each file with differences that do not matter.

    Raises:
        MergeError: Tensors, configurations, tokenizers, templates or processors differ in a way that affects the result.
    """
    first, warnings = directories[0], []
    for other in directories[1:]:
        _refuse_other_tensors(first, other, any_float=config.dtype is not None)
        found = [
            *config_differences(first.path, other.path),
            *tokenizer_differences(first.path, other.path),
            *processor_differences(first.path, other.path),
            *code_differences(first.path, other.path),
        ]
        refused = [one for one in found if one.is_refused and one.key not in config.allow_different]
        if refused:
            raise _refusal(first, other, refused)
        warnings += _warnings(first, other, found)
    return warnings


def _refusal(first: ModelDirectory, other: ModelDirectory, refused: Sequence[Difference]) -> DirectoryError:
    one = refused[0]
    more = (
        [f"{len(refused) - 1} more"] if len(refused) > _NAMED_IN_MESSAGE else [_named(other) for other in refused[1:]]
    )
    return DirectoryError(
        f"{other.path / one.file}: {_named(one)} is {one.other}, but {one.first} in {first.path}"
        f"{' (also different: ' + ', '.join(more) + ')' if more else ''}. The average would be wrong. "
        f"Merge models with equal settings, or allow the difference with --allow-different {one.key!r:.200}."
    )


def _warnings(first: ModelDirectory, other: ModelDirectory, found: Sequence[Difference]) -> list[str]:
    by_file: dict[str, list[str]] = {}
    for one in found:
        names = by_file.setdefault(one.file, [])
        names.append(f"{_named(one)} ({one.other}, in the first model {one.first})")
    warnings = []
    for file, names in by_file.items():
        more = f" and {len(names) - _NAMED_IN_MESSAGE} more" if len(names) > _NAMED_IN_MESSAGE else ""
        listed = ", ".join(names[:_NAMED_IN_MESSAGE]) + more
        warnings.append(f"{other.path / file}: differs in {listed}. The merged model keeps the values of {first.path}.")
    return warnings


def _named(one: Difference) -> str:
    """The key for a message, escaped if it is not printable."""
    return f"{one.key if one.key.isprintable() else repr(one.key):.200}"


def _refuse_other_tensors(first: ModelDirectory, other: ModelDirectory, *, any_float: bool) -> None:
    missing = sorted(first.tensors.keys() - other.tensors.keys())
    extra = sorted(other.tensors.keys() - first.tensors.keys())
    if missing or extra:
        name, where, lacks = (missing[0], first.path, other.path) if missing else (extra[0], other.path, first.path)
        raise DirectoryError(
            f"{lacks}: {len(missing) + len(extra)} tensors are in only one of the models, the first is {name} of {where}. "
            "Merge models of one architecture."
        )
    for name, left in first.tensors.items():
        right = other.tensors[name]
        if left.shape != right.shape:
            raise DirectoryError(
                f"{other.path / right.file}: tensor {name} has shape {list(right.shape)}, "
                f"but {list(left.shape)} in {first.path}. Merge models of one size."
            )
        both_float = left.dtype.is_floating_point and right.dtype.is_floating_point
        if left.dtype != right.dtype and not (any_float and both_float):
            raise DirectoryError(
                f"{other.path / right.file}: tensor {name} is stored as {right.dtype}, but as {left.dtype} in {first.path}. "
                "Choose the type of the result (--dtype) to mix them."
            )
