# SPDX-License-Identifier: Apache-2.0
"""Answers survive a kill."""

from mindvl_merge.evaluation.cache import AnswerCache


def test_answers_come_back_and_a_cut_line_is_dropped(tmp_path):
    path = tmp_path / "deep" / "answers.jsonl"
    AnswerCache(path).add({"a": "1", "b": "two\nlines"})
    path.write_bytes(path.read_bytes() + b'{"key": "c", "ans')
    cache = AnswerCache(path)
    assert cache.answers == {"a": "1", "b": "two\nlines"}
    cache.add({"d": "4"})
    assert AnswerCache(path).answers == {"a": "1", "b": "two\nlines", "d": "4"}


def test_without_a_path_answers_stay_in_memory():
    cache = AnswerCache(None)
    cache.add({"a": "1"})
    assert cache.answers == {"a": "1"}
