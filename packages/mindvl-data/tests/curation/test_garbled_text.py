# SPDX-License-Identifier: Apache-2.0
"""Texts with damaged characters."""

from pathlib import Path

import pytest

from mindvl_data.curation.garbled_text import GarbledText, garbled_text
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop

CLEAN = (
    "A plain caption of a caf\xe9 in S\xc3O PAULO, 5 \u20ac \u2014 \u201cquoted\u201d",
    "\u4e2d\u6587\u63cf\u8ff0\uff0c\u5305\u542b\u6807\u70b9\u3002",
    "\u041a\u043e\u0448\u043a\u0430 \u0441\u043f\u0438\u0442",
    "emoji \U0001f468\u200d\U0001f469\u200d\U0001f467 and marks \u0644\u0651",
    "line\r\nends\tand tabs",
)


def outcomes(*texts: str) -> list[object]:
    records = [Record(number=number, id="", body={"content": text}) for number, text in enumerate(texts)]
    return list(garbled_text(records, GarbledText(), Context(seed=0, cache=Path())))


def test_clean_texts_of_several_scripts_are_kept() -> None:
    assert [outcome.facts["garbled_ratio"] for outcome in outcomes(*CLEAN) if isinstance(outcome, Record)] == [0.0] * 5


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
@pytest.mark.parametrize(
    "text", ["caf\xe9 na\xefve", "\u4e2d\u6587", "\u201cquoted\u201d", "\u041a\u043e\u0448\u043a\u0430"]
)
def test_utf_8_that_was_decoded_in_another_encoding_is_dropped(text: str, encoding: str) -> None:
    damaged = text.encode().decode(encoding, "replace")
    assert isinstance(outcomes(damaged)[0], Drop), damaged


@pytest.mark.parametrize("text", ["a\x00b", "a\ufffdb", "a\ue000b", "\u951f\u65a4\u62f7 abc"])
def test_control_private_and_replacement_characters_are_dropped(text: str) -> None:
    assert isinstance(outcomes(text)[0], Drop)


def test_lone_surrogates_are_dropped() -> None:
    assert isinstance(outcomes("a" + chr(0xD800) + "b")[0], Drop)


def test_the_share_counts_each_damaged_character_once() -> None:
    (dropped,) = outcomes("ab\xc3\xa9\x85e")  # two characters of one letter, one control character
    assert isinstance(dropped, Drop)
    assert dropped.facts == {"garbled_ratio": 0.5}
