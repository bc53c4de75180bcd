# SPDX-License-Identifier: Apache-2.0
"""Answers survive a kill."""

import io
from pathlib import Path

import pytest

from mindvl_merge.errors import EvaluationError
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


def test_damaged_lines_are_ignored_and_times_come_back(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"key": "a", "ans\nnot json\n3\n{"key": "b", "answer": 4}\n{"key": "c", "answer": "1"}\n')
    cache = AnswerCache(path)
    assert cache.answers == {"c": "1"}
    cache.add({"d": "2"}, {"d": 0.25})
    assert (AnswerCache(path).answers, AnswerCache(path).seconds) == ({"c": "1", "d": "2"}, {"d": 0.25})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full exists on Linux only")
def test_a_full_disk_is_named_with_the_remedy():
    with pytest.raises(EvaluationError, match=r"/dev/full: answers cannot be saved \(No space left.*it continues"):
        AnswerCache(Path("/dev/full")).add({"a": "1"})


def test_a_write_that_fails_in_the_middle_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "answers.jsonl"
    cache = AnswerCache(path)
    cache.add({"a": "1"})
    before = path.read_bytes()

    class Short:
        """Writes five bytes, then the disk is full."""

        def __init__(self, file):
            self.file, self.num_writes = file, 0

        def write(self, content):
            self.num_writes += 1
            if self.num_writes > 1:
                raise OSError(28, "No space left on device")
            return self.file.write(content[:5])

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    monkeypatch.setattr("builtins.open", lambda *arguments, **options: Short(io.FileIO(arguments[0], "ab")))
    with pytest.raises(EvaluationError, match="No space left on device"):
        cache.add({"b": "2"})
    monkeypatch.undo()
    assert path.read_bytes() == before
