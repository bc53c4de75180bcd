# SPDX-License-Identifier: Apache-2.0
"""Limits on length, lines, characters, repetition and listed words of texts."""

from pathlib import Path
from typing import Any

import pytest

from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop, find_step
from mindvl_data.curation.text_rules import TextLength


def run(name: str, *texts: str, cache: Path = Path(), **parameters: Any) -> list[Any]:
    step = find_step(name)
    records = [Record(number=number, id=str(number), body={"content": text}) for number, text in enumerate(texts)]
    assert step.function is not None
    return list(step.function(records, step.config(**parameters), Context(seed=0, cache=cache)))


def reasons(outcomes: list[Any]) -> list[str | None]:
    return [outcome.reason if isinstance(outcome, Drop) else None for outcome in outcomes]


def test_length_is_measured_in_characters_and_words() -> None:
    outcomes = run(
        "text_length", "cat", "a black cat", "two words!", "\u4e00\u53ea\u9ed1\u732b\u3002", "w " * 9, max_words=8
    )
    assert reasons(outcomes) == ["too_short", None, "too_few_words", None, "too_many_words"]
    assert outcomes[1].facts == {"num_characters": 11, "num_words": 3}
    assert outcomes[3].facts == {"num_characters": 5, "num_words": 4}
    assert outcomes[4].value == 9


def test_numbers_are_words() -> None:
    assert run("text_length", "3 cats, 2019 (?)")[0].facts["num_words"] == 3


def test_chinese_without_spaces_is_one_word_if_ideographs_do_not_count() -> None:
    assert reasons(run("text_length", "\u4e00\u53ea\u9ed1\u732b\u3002", ideographs_are_words=False)) == [
        "too_few_words"
    ]


def test_limits_are_inclusive_and_an_empty_range_is_refused() -> None:
    assert reasons(run("text_length", "a b c", min_characters=5, max_characters=5)) == [None]
    with pytest.raises(ValueError, match="min_characters: 9 is larger than max_characters, 5"):
        TextLength(min_characters=9, max_characters=5)


def test_lines_have_an_average_and_a_longest_length() -> None:
    outcomes = run("line_length", "0123456789\n01234", "a\nb", "0123456789 0123456789", "", max_longest=15)
    # 16 characters in two lines; 3 characters in two lines
    assert reasons(outcomes) == ["lines_too_short", "lines_too_short", "longest_line_too_long", "lines_too_short"]
    assert [outcome.facts["average_line_length"] for outcome in outcomes] == [8.0, 1.5, 21.0, 0.0]
    assert outcomes[0].facts["longest_line"] == 10


def test_shares_of_characters_have_limits() -> None:
    outcomes = run("character_ratios", "ab!!!!!!!!", "a1b2 -", "abcd efgh?!+-")
    assert reasons(outcomes) == ["few_alphanumeric", None, "many_special"]
    assert outcomes[0].facts == {"alphanumeric_ratio": 0.2, "special_ratio": 0.8}
    assert outcomes[1].facts == {"alphanumeric_ratio": round(4 / 6, 6), "special_ratio": round(1 / 6, 6)}


def test_a_file_defines_the_special_characters(tmp_path: Path) -> None:
    file = tmp_path / "special.txt"
    file.write_text("b\nU+000A\n", encoding="utf-8")
    outcomes = run("character_ratios", "ab\nc!", special_characters=file, max_special=None)
    assert outcomes[0].facts["special_ratio"] == 0.4


def test_repetition_of_characters_and_words_is_dropped() -> None:
    varied = "A black cat sleeps on the red sofa beside a window while rain falls outside."
    outcomes = run(
        "repetition", "na" + "a" * 60, varied, "one two three four one two three four", words=2, max_words=0.8
    )
    assert reasons(outcomes) == ["repeated_characters", None, "repeated_words"]
    # seven pairs of words: one-two, two-three and three-four occur twice, four-one once
    assert outcomes[2].facts["word_repetition"] == round(6 / 7, 6)
    assert outcomes[1].facts == {"character_repetition": 0.0, "word_repetition": 0.0}


def test_the_case_of_repeated_words_does_not_matter() -> None:
    outcomes = run("repetition", "Red red, RED red!", words=1)
    assert outcomes[0].facts["word_repetition"] == 1.0


def test_the_share_of_listed_words_has_limits(tmp_path: Path) -> None:
    file = tmp_path / "stop.txt"
    file.write_text("the\nof\n\u7684\n", encoding="utf-8")
    texts = ("The top of it.", "no such word", "\u732b\u7684\u5bb6", "")
    outcomes = run("listed_words", *texts, file=file, min_ratio=0.3)
    assert reasons(outcomes) == [None, "few_listed_words", None, "few_listed_words"]
    assert [outcome.facts["listed_words_ratio"] for outcome in outcomes] == [0.5, 0.0, round(1 / 3, 6), 0.0]


def test_a_batch_without_records_is_allowed() -> None:
    assert run("repetition") == run("text_length") == run("character_ratios") == []


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("text_length", {}), ("line_length", {}), ("character_ratios", {}), ("repetition", {"words": 2, "characters": 3}),
        ("garbled_text", {}), ("boilerplate", {}), ("text_language", {}),
    ],
)  # fmt: skip
def test_the_outcome_of_a_text_does_not_depend_on_its_batch(name: str, parameters: dict[str, Any]) -> None:
    words = ("red", "Cat", "\u732b", "12", "caf\xe9", "click here", "\ufffd", "www.a.b/c", ",", "\n")
    texts = [" ".join(words[place % size] for place in range(3 * size)) for size in range(1, len(words) + 1)]
    alone = [run(name, text, **parameters)[0] for text in texts]
    for one, together in zip(alone, run(name, *texts, **parameters), strict=True):
        assert type(one) is type(together)
        assert one.facts == together.facts
        assert getattr(one, "reason", None) == getattr(together, "reason", None)
