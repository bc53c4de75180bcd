# SPDX-License-Identifier: Apache-2.0
"""Made text records for the curation benchmark: lengths, words and noise as in web data, in English-like words and Chinese.

Most texts are alt texts and captions, some are paragraphs; words follow Zipf's law. One in eight is noise: repeated phrases,
symbols, numbers, file names, single words.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np

# share, smallest and largest number of words (characters in Chinese)
KINDS = (("alt text", 0.42, 3, 20), ("caption", 0.2, 20, 60), ("paragraph", 0.13, 80, 400), ("chinese", 0.13, 8, 200))
NOISE = ("spam", "symbols", "numbers", "file", "word", "lines")
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvw" for vowel in "aeiou"]
_SIGNS = [*"!#$%&*+=~|<>@-17", "\u2605", "\u25cf", "\U0001f600", "\u2764"]


def write_records(path: Path, count: int, seed: int) -> None:
    """Write JSON lines with `id` and `text`."""
    generator = np.random.default_rng(seed)
    words = _vocabulary(generator, 30_000)
    ideographs = np.array([chr(code) for code in generator.permutation(np.arange(0x4E00, 0x4E00 + 4000))])
    shares = [share for _, share, _, _ in KINDS]
    kinds = generator.choice(len(KINDS) + 1, size=count, p=[*shares, 1 - sum(shares)])
    with path.open("w", encoding="utf-8") as file:
        for number, kind in enumerate(kinds):
            if kind == len(KINDS):
                text = _noise(generator, words)
            else:
                name, _, least, most = KINDS[kind]
                size = int(np.exp(generator.uniform(np.log(least), np.log(most + 1))))
                text = _chinese(generator, ideographs, size) if name == "chinese" else _english(generator, words, size)
            file.write(json.dumps({"id": number, "text": text}, ensure_ascii=False) + "\n")


def flagged_words(seed: int) -> list[str]:
    """Words of the vocabulary that the benchmark's list of flagged words has."""
    generator = np.random.default_rng(seed)
    return sorted(_vocabulary(generator, 30_000)[2000::100].tolist())


def _vocabulary(generator: np.random.Generator, size: int) -> np.ndarray:
    """Different words of one to four syllables, the most frequent first."""
    counts = generator.integers(1, 5, 3 * size)
    made = dict.fromkeys(
        "".join(_SYLLABLES[one] for one in generator.integers(len(_SYLLABLES), size=n)) for n in counts
    )
    return np.array(list(made)[:size])


@cache
def _shares(most: int) -> np.ndarray:
    """Cumulative shares of words by rank."""
    shares = np.cumsum(1 / (np.arange(most) + 2.7))
    return shares / shares[-1]


def _zipf(generator: np.random.Generator, size: int, most: int) -> np.ndarray:
    return np.searchsorted(_shares(most), generator.random(size))


def _english(generator: np.random.Generator, words: np.ndarray, size: int) -> str:
    found = words[_zipf(generator, size, len(words))].tolist()
    found[0] = found[0].capitalize()
    for place in range(9, size, 10):
        found[place] += ",.;!"[place // 10 % 4]
    text = " ".join(found) + "."
    return text if size < 60 else text.replace(". ", ".\n")


def _chinese(generator: np.random.Generator, ideographs: np.ndarray, size: int) -> str:
    found = ideographs[_zipf(generator, size, len(ideographs))].tolist()
    for place in range(11, size, 12):
        found[place] = "\uff0c\u3002"[place // 12 % 2]
    return "".join(found) + "\u3002"


def _noise(generator: np.random.Generator, words: np.ndarray) -> str:
    match NOISE[generator.integers(len(NOISE))]:
        case "spam":
            phrase = _english(generator, words, int(generator.integers(1, 6)))
            return " ".join([phrase] * int(generator.integers(10, 60)))
        case "symbols":
            return "".join(generator.choice(_SIGNS, int(generator.integers(5, 80))))
        case "numbers":
            return " ".join(map(str, generator.integers(0, 10_000, int(generator.integers(1, 30)))))
        case "file":
            return f"IMG_{generator.integers(10_000)}.jpg"
        case "word":
            return str(words[_zipf(generator, 1, len(words))[0]])
        case _:
            return "\n".join(words[_zipf(generator, int(generator.integers(5, 50)), len(words))].tolist())
