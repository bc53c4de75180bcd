# SPDX-License-Identifier: Apache-2.0
"""Check that the models of a merge have compatible configurations, tokenizers, templates and processors.

Comes after sources.py paired the tensors, before anything is written. A difference that affects the result is refused,
any other is returned as a warning; values are checked while they are read (run.py).
"""

from collections.abc import Sequence
from dataclasses import replace

from .config import MergeConfig
from .differences import Difference, code_differences, config_differences, processor_differences
from .directory import ModelDirectory
from .errors import DirectoryError
from .tokenizers import tokenizer_differences

_NAMED_IN_MESSAGE = 6


def check_parents(config: MergeConfig, directories: Sequence[ModelDirectory]) -> list[str]:
    """Compare every model with the first; returns one warning for each file with differences that do not matter.

    Raises:
        MergeError: Configurations, tokenizers, templates or processors differ in a way that affects the result.
    """
    first, warnings = directories[0], []
    for other in directories[1:]:
        found = [
            *config_differences(first.path, other.path, language_only=config.is_language_only),
            *tokenizer_differences(first.path, other.path),
            *processor_differences(first.path, other.path),
            *code_differences(first.path, other.path),
        ]
        found = [replace(one, is_refused=one.is_refused and not _is_handled(config, one)) for one in found]
        refused = [one for one in found if one.is_refused and one.key not in config.allow_different]
        if refused:
            raise _refusal(first, other, refused)
        warnings += _warnings(first, other, found)
    return warnings


def _is_handled(config: MergeConfig, one: Difference) -> bool:
    """Whether the merge itself takes care of a difference: rows matched by token, and files of other parts of the model."""
    by_token = config.match_tokens or config.is_language_only
    if by_token and (one.key.startswith(("token ", "added token ")) or one.key == "added_tokens_decoder"):
        return True
    return config.is_language_only and (
        one.key.startswith("chat_template") or one.file.endswith("processor_config.json")
    )


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
