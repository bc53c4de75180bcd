# SPDX-License-Identifier: Apache-2.0
"""Rows of the same token in two tokenizers."""

import json

import pytest

from mindvl_merge import MergeError
from mindvl_merge.vocabulary import matching_rows, token_ids


def _directory(path, tokens, added=(), name="tokenizer.json"):
    path.mkdir()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    document = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": i, "content": t} for t, i in added]}
    (path / name).write_text(json.dumps(document if name == "tokenizer.json" else vocabulary))
    return path


def test_rows_follow_tokens_and_padding_keeps_its_index(tmp_path):
    first = _directory(tmp_path / "a", ["x", "y", "z"], added=[("<new>", 3)])
    other = _directory(tmp_path / "b", ["z", "x", "y"])
    # 3 is a new token; 4 and 5 are padding in both; 6 is beyond the other vocabulary
    assert matching_rows(first, other, 7, 6).tolist() == [1, 2, 0, -1, 4, 5, -1]


def test_a_padding_row_is_not_matched_with_a_token(tmp_path):
    first, other = _directory(tmp_path / "a", ["x", "y"]), _directory(tmp_path / "b", ["x", "y", "extra"])
    assert matching_rows(first, other, 4, 4).tolist() == [0, 1, -1, 3]


def test_older_vocabulary_files_are_read(tmp_path):
    path = _directory(tmp_path / "a", ["x", "y"], name="vocab.json")
    (path / "added_tokens.json").write_text('{"<s>": 2}')
    assert token_ids(path) == {"x": 0, "y": 1, "<s>": 2}


def test_unigram_vocabularies_are_lists(tmp_path):
    path = _directory(tmp_path / "a", [])
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["x", -1.0], ["y", -2.0]]}}))
    assert token_ids(path) == {"x": 0, "y": 1}


@pytest.mark.parametrize(
    "document", [{}, {"model": {"vocab": {"x": "0"}}}, {"model": {"vocab": {}}, "added_tokens": 3}]
)
def test_damaged_vocabularies_are_named(tmp_path, document):
    path = _directory(tmp_path / "a", ["x"])
    (path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(MergeError, match="tokenizer"):
        token_ids(path)


def test_models_without_tokenizers_have_the_same_rows(tmp_path):
    (tmp_path / "a").mkdir()
    assert matching_rows(tmp_path / "a", tmp_path / "a", 3, 3).tolist() == [0, 1, 2]
    with pytest.raises(MergeError, match=r"has no tokenizer\.json and no vocab\.json"):
        matching_rows(tmp_path / "a", tmp_path / "a", 3, 4)
