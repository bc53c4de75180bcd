# SPDX-License-Identifier: Apache-2.0
"""MinHash signatures against datasketch, and groups against exact Jaccard similarities."""

import random
from itertools import combinations
from typing import Any

import datasketch
import numpy as np
import pytest

from mindvl_data.curation.duplicates.minhash import STEP, TextDuplicates, sign, text_shingles
from mindvl_data.curation.record import Record


def _record(number: int, text: str) -> Record:
    return Record(number=number, id=str(number), body={"content": text})


def _words(seed: int, count: int) -> list[str]:
    return [f"w{random.Random(seed).randrange(10**9)}x{i}" for i in range(count)]


def _edited(words: list[str], places: list[int]) -> str:
    return " ".join(f"new{i}" if i in places else word for i, word in enumerate(words))


def test_a_signature_is_that_of_datasketch(context: Any) -> None:
    (found,) = sign([_record(0, "one two three four five six")], TextDuplicates(), context)
    expected = datasketch.MinHash(112, seed=1)
    for shingle in (b"one two three four five", b"two three four five six"):
        expected.update(shingle)
    assert found[0, :448].view("<u4").tolist() == expected.hashvalues.tolist()


def test_shingles_are_of_words_or_of_characters() -> None:
    assert text_shingles("One two, three", "words", 2) == ["one two", "two three"]
    assert text_shingles("One  2", "characters", 4) == ["one ", "ne 2"]
    assert text_shingles("\u56fe\u50cf\u6a21\u578b", "words", 3) == ["\u56fe \u50cf \u6a21", "\u50cf \u6a21 \u578b"]
    assert text_shingles("", "characters", 4) == []


def test_an_edited_text_is_a_duplicate_and_a_rewritten_one_is_not(decide: Any) -> None:
    words = _words(1, 200)
    texts = [
        " ".join(words),
        " ".join(_words(2, 200)),
        _edited(words, [50, 150]),  # 10 of 196 shingles change: similarity 186 / 206 = 0.90
        _edited(words, list(range(0, 200, 10))),  # half of the shingles change: similarity 0.33
        " ".join(words).upper() + "!",
        "",
        "",
    ]
    found = decide(STEP, TextDuplicates(), [_record(number, text) for number, text in enumerate(texts)])
    assert {number: d.drop.value for number, d in found.items() if d.drop} == {2: "same as 0:0", 4: "same as 0:0"}


def test_groups_follow_exact_similarity_away_from_the_threshold(decide: Any) -> None:
    """Pairs are drawn with similarities above 0.9 or below 0.5, where bands and estimates decide reliably."""
    generator, texts = random.Random(4), []
    for seed in range(25):
        words = _words(seed, 120)
        texts.append(" ".join(words))
        texts += [_edited(words, [generator.randrange(120)]) for _ in range(generator.randrange(3))]
        texts.append(_edited(words, generator.sample(range(120), 30)))
    sets = [set(text_shingles(text, "words", 5)) for text in texts]
    names = list(range(len(texts)))
    for i, j in combinations(range(len(texts)), 2):
        similarity = len(sets[i] & sets[j]) / len(sets[i] | sets[j])
        assert similarity < 0.5 or similarity > 0.8
        if similarity > 0.8:
            low, high = sorted((names[i], names[j]))
            names = [low if name == high else name for name in names]
    found = decide(STEP, TextDuplicates(), [_record(number, text) for number, text in enumerate(texts)])
    kept = {number: f"same as 0:{name}" for number, name in enumerate(names) if name != number}
    assert kept
    assert {number: d.drop.value for number, d in found.items() if d.drop} == kept


def test_results_do_not_depend_on_memory(decide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [_edited(_words(seed % 9, 60), [seed % 4]) for seed in range(60)]
    records = [_record(number, text) for number, text in enumerate(texts)]
    expected = decide(STEP, TextDuplicates(), records)
    monkeypatch.setattr("mindvl_data.curation.duplicates.sorting._MIN_BLOCK_ROWS", 5)
    monkeypatch.setattr("mindvl_data.curation.duplicates.minhash.MIB", 1)
    assert decide(STEP, TextDuplicates(), records) == expected
    assert np.any([decision.drop for decision in expected.values()])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("shingle_size", 0, "must be at least 1"),
        ("num_bands", 0, "must be at least 1"),
        ("threshold", 1.5, "at most 1"),
    ],
)
def test_parameters_out_of_range_are_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: .*{message}"):
        TextDuplicates(**{field: value})
