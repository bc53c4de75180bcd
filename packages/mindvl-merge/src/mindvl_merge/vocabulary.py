# SPDX-License-Identifier: Apache-2.0
"""Match the rows of embedding and output layer of two models by token.

Comes beside tokenizers.py, before sources.py. A multimodal model often has the vocabulary of its language model with more
special tokens, so that the row of a token has another index or exists in one model only.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from .errors import DirectoryError
from .files import read_json, regular_file

_NONE = -1


def token_ids(path: Path) -> dict[str, int]:
    """The id of every token of a model directory, from tokenizer.json or from vocab.json and added_tokens.json.

    Raises:
        DirectoryError: There is no such file, or one is damaged.
    """
    if (path / "tokenizer.json").exists():
        document = read_json(regular_file(path, "tokenizer.json"))
        model, added = document.get("model"), document.get("added_tokens") or []
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocabulary, list):  # Unigram: [token, score] at each id
            ids = {
                str(entry[0]): number for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry
            }
        elif isinstance(vocabulary, dict):
            ids = dict(vocabulary)
        else:
            raise DirectoryError(f"{path / 'tokenizer.json'}: has no vocabulary. Copy the file again.")
        if not isinstance(added, list) or not all(isinstance(one, dict) for one in added):
            raise DirectoryError(
                f"{path / 'tokenizer.json'}: added_tokens is not a list of tokens. Copy the file again."
            )
        ids |= {str(one.get("content")): one.get("id") for one in added}
    elif (path / "vocab.json").exists():
        ids = dict(read_json(regular_file(path, "vocab.json")))
        if (path / "added_tokens.json").exists():
            ids |= read_json(regular_file(path, "added_tokens.json"))
    else:
        raise DirectoryError(
            f"{path}: has no tokenizer.json and no vocab.json, so rows cannot be matched by token. Copy the tokenizer of "
            "this model into the directory."
        )
    if not all(type(number) is int and number >= 0 for number in ids.values()):
        raise DirectoryError(f"{path}: the tokenizer has a token whose id is not a number. Copy the tokenizer again.")
    return ids


def has_tokenizer(path: Path) -> bool:
    """Whether a model directory has a vocabulary that can be read."""
    return (path / "tokenizer.json").exists() or (path / "vocab.json").exists()


def matching_rows(first: Path, other: Path, num_rows: int, num_other_rows: int) -> npt.NDArray[np.int64]:
    """For each row of the first model the row of the same token in the other model, or -1; `[num_rows]`.

    Two models of one size without tokenizers have the same rows.

    Raises:
        DirectoryError: The two tokenizers have fewer than half of the tokens of the first in common.
    """
    if num_rows == num_other_rows and not has_tokenizer(first) and not has_tokenizer(other):
        return np.arange(num_rows)
    one, two = token_ids(first), token_ids(other)
    rows = np.full(num_rows, _NONE, np.int64)
    unused = np.ones((2, max(num_rows, num_other_rows)), bool)  # rows of no token: padding, matched by index
    for which, ids in enumerate((one, two)):
        unused[which, [number for number in ids.values() if number < unused.shape[1]]] = False
    padding = np.flatnonzero((unused[0] & unused[1])[: min(num_rows, num_other_rows)])
    rows[padding] = padding
    for token, number in one.items():
        there = two.get(token, _NONE)
        if number < num_rows and there < num_other_rows:
            rows[number] = there
    matched = sum(token in two for token in one)
    if 2 * matched < min(len(one), num_rows):
        raise DirectoryError(
            f"{other}: only {matched} of {len(one)} tokens of {first} exist in this tokenizer. Merge models that share a "
            "tokenizer."
        )
    return rows
