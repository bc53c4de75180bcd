# SPDX-License-Identifier: Apache-2.0
"""Recall and precision of curation steps on a set with planted duplicates, garbage and contamination, and rare classes.

Run: python packages/mindvl-data/benchmarks/planted.py [--quick] [--json]
Images are distinct windows of the photographs that scikit-image and scikit-learn ship; texts are paragraphs of the Python
reference that pydoc ships; digits are those of scikit-learn. Each kind of planted record is made from its own
originals. Each step runs alone over all records. Recall: share of the planted records of a kind that the step drops;
precision: share of the dropped records that are planted, and of an image or text that the step is meant to find.
"""

import argparse
import io
import json
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, print_report
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Decision, Drop, find_step

WINDOW = 128  # pixels of a side of an original
PHOTOGRAPHS = (
    *("astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "grass.png", "gravel.png"),
    *("hubble_deep_field.jpg", "ihc.png", "motorcycle_left.png", "page.png", "retina.jpg", "rocket.jpg", "text.png"),
)
# Words of the reference and others that may stand for them.
SYNONYMS = {
    "object": "entity", "value": "quantity", "values": "quantities", "function": "routine", "name": "identifier",
    "used": "employed", "may": "can", "must": "has to", "this": "that", "the": "this", "returns": "yields",
    "called": "invoked", "is": "remains", "are": "stay", "when": "once", "if": "whenever", "for": "regarding",
    "with": "using", "in": "within", "not": "never", "be": "become", "example": "instance", "which": "that",
    "following": "next", "expression": "formula", "statement": "command", "class": "type", "method": "procedure",
}  # fmt: skip
TEMPLATES = ("uniform page", "tiny image", "list of URLs", "benchmark image", "short question (to be kept)")
GARBAGE = ("uniform page", "tiny image", "mojibake", "one repeated phrase", "list of URLs")
LONG_QUESTION = 20  # words of a benchmark question


@dataclass
class PlantedSet:
    """Records, and what is known about each."""

    records: list[Record] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # "" for originals
    origins: list[int] = field(default_factory=list)  # number of the original; the record itself if there is none
    in_benchmark: set[int] = field(default_factory=set)  # originals of benchmark items

    def add(self, *, image: bytes | None = None, text: str = "", kind: str = "", origin: int | None = None) -> int:
        number = len(self.records)
        content: list[Any] = [{"type": "image"}] * (image is not None) + ([text] if text else [])
        media = () if image is None else (image,)
        self.records.append(Record(number=number, id=f"planted:{number}", body={"content": content}, media=media))
        self.kinds.append(kind)
        self.origins.append(number if origin is None else origin)
        return number


def run(*, quick: bool = False) -> list[Figure]:
    """Make the set, run every step, and measure what it drops."""
    per_kind = 12 if quick else 60
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        planted = make_set(per_kind, directory / "benchmark.jsonl")
        figures = [figure for case in _cases(directory) for figure in _figures(planted, directory, *case)]
    return [*figures, *diversity()]


def make_set(per_kind: int, benchmark: Path) -> PlantedSet:
    """The records in a shuffled order in which every copy comes after its original; writes the benchmark file."""
    generator = random.Random(0)
    windows, texts = photograph_windows(), paragraphs()
    generator.shuffle(windows)
    generator.shuffle(texts)
    planted = PlantedSet()
    images = [planted.add(image=_png(window)) for window in windows]
    articles = [planted.add(text=text) for text in texts]
    for number, (kind, change) in enumerate(IMAGE_CHANGES.items()):
        for place in range(per_kind):
            origin = (number * per_kind + place) % len(windows)
            planted.add(image=change(windows[origin]), kind=kind, origin=images[origin])
    for number, (kind, edit) in enumerate(TEXT_CHANGES.items()):
        for place in range(per_kind):
            origin = (number * per_kind + place) % len(texts)
            planted.add(text=edit(texts[origin], generator), kind=kind, origin=articles[origin])
    for kind in GARBAGE:
        for place in range(per_kind):
            planted.add(**_garbage(kind, texts[place], generator), kind=kind)
    _plant_contamination(planted, windows, texts, articles, per_kind, benchmark)
    return planted


def photograph_windows() -> list[Image.Image]:
    """Windows of real photographs that do not overlap."""
    import skimage
    import sklearn.datasets

    shipped = Path(skimage.__file__).parent / "data"
    photos = [Image.open(shipped / name).convert("RGB") for name in PHOTOGRAPHS]
    photos += [Image.fromarray(sklearn.datasets.load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]
    found = []
    for photo in photos:
        for top in range(0, photo.height - WINDOW + 1, WINDOW):
            for left in range(0, photo.width - WINDOW + 1, WINDOW):
                window = photo.crop((left, top, left + WINDOW, top + WINDOW))
                if np.asarray(window).std() > 12:  # windows of black sky are equal to the eye
                    found.append(window)
    return found


def paragraphs() -> list[str]:
    """Distinct paragraphs of at least 60 words of the Python reference."""
    from pydoc_data.topics import topics

    found = [" ".join(part.split()) for text in topics.values() for part in re.split(r"\n\s*\n", text)]
    return sorted({part for part in found if len(part.split()) >= 60})


def _png(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def _jpeg(image: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def _cropped(image: Image.Image, share: float) -> bytes:
    border = round(share * WINDOW)
    return _png(image.crop((border, border, WINDOW - border, WINDOW - border)))


IMAGE_CHANGES: dict[str, Callable[[Image.Image], bytes]] = {
    "same bytes": _png,
    "same pixels, other PNG": lambda image: _png(image, compress_level=0),
    "resized to 1/2": lambda image: _png(image.resize((WINDOW // 2, WINDOW // 2), Image.Resampling.LANCZOS)),
    "resized to 200 x 90": lambda image: _png(image.resize((200, 90), Image.Resampling.BICUBIC)),
    "JPEG of quality 50": lambda image: _jpeg(image, 50),
    "JPEG of quality 15": lambda image: _jpeg(image, 15),
    "brightness 0.8": lambda image: _png(ImageEnhance.Brightness(image).enhance(0.8)),
    "cropped by 2 % a side": lambda image: _cropped(image, 0.02),
    "cropped by 5 % a side": lambda image: _cropped(image, 0.05),
}


def _replaced(text: str, share: float, generator: random.Random) -> str:
    """Replace this share of the words: by synonyms where the table has one, otherwise by a repetition of another word."""
    words = text.split()
    for place in generator.sample(range(len(words)), max(1, round(share * len(words)))):
        words[place] = SYNONYMS.get(words[place].lower(), words[generator.randrange(len(words))])
    return " ".join(words)


def _reordered(text: str, generator: random.Random) -> str:
    sentences = re.split(r"(?<=[.;:]) ", text)
    generator.shuffle(sentences)
    return " ".join(sentences)


TEXT_CHANGES: dict[str, Callable[[str, random.Random], str]] = {
    "same text": lambda text, generator: text,
    "other case and spaces": lambda text, generator: f"  {text.upper()}".replace(" ", "\n", 3),
    "no punctuation": lambda text, generator: re.sub(r"[.,;:()\"]", "", text),
    "1 word of 40 replaced": lambda text, generator: _replaced(text, 1 / 40, generator),
    "1 word of 10 replaced": lambda text, generator: _replaced(text, 1 / 10, generator),
    "sentences reordered": lambda text, generator: _reordered(text, generator),
    "reordered, 1 word of 4 replaced": lambda text, generator: _replaced(_reordered(text, generator), 1 / 4, generator),
}


def _garbage(kind: str, text: str, generator: random.Random) -> dict[str, Any]:
    if kind == "uniform page":
        return {"image": _png(Image.new("RGB", (WINDOW, WINDOW), (generator.randrange(256),) * 3))}
    if kind == "tiny image":
        return {"image": _png(Image.new("RGB", (generator.randrange(2, 16), 12), (9, 99, generator.randrange(256))))}
    if kind == "mojibake":
        chinese = "".join(chr(generator.randrange(0x4E00, 0x9FA5)) for _ in range(80))
        return {"text": chinese.encode().decode("latin-1")}
    if kind == "one repeated phrase":
        return {"text": " ".join(text.split()[:6]) * 20}
    hosts = (f"https://example.com/{generator.getrandbits(40):x}" for _ in range(15))
    return {"text": " ".join(hosts)}


def _plant_contamination(
    planted: PlantedSet,
    windows: Sequence[Image.Image],
    texts: Sequence[str],
    articles: Sequence[int],
    per_kind: int,
    benchmark: Path,
) -> None:
    """Benchmark items from originals, which are contaminated then, and further records that contain them."""
    items = []
    benchmark.parent.mkdir(exist_ok=True)
    for place in range(per_kind):
        words = texts[place].split()
        window = windows[-1 - place]
        (benchmark.parent / f"{place}.png").write_bytes(_png(window))
        question = " ".join(words[5 : 5 + LONG_QUESTION])
        items += [{"id": f"long {place}", "question": question, "answer": "yes"}]
        items += [{"id": f"image {place}", "question": "What is shown here?", "answer": "it", "image": f"{place}.png"}]
        planted.in_benchmark |= {articles[place], len(windows) - 1 - place}
        planted.add(text=f"Quiz of the day: {question.lower()}. Think first.", kind="benchmark question")
        planted.add(
            image=_jpeg(window.resize((100, 100)), 60), text=f"A view, {place}.", kind="benchmark image",
            origin=len(windows) - 1 - place,
        )  # fmt: skip
        planted.add(text=f"What is shown here? Scene {place}.", kind="short question (to be kept)")
    benchmark.write_text("\n".join(map(json.dumps, items)), encoding="utf-8")


Case = tuple[str, str, dict[str, Any], tuple[str, ...]]


def _cases(directory: Path) -> Iterator[Case]:
    """Name, step, parameters, and the kinds that the step is meant to drop."""
    images, texts = list(IMAGE_CHANGES), list(TEXT_CHANGES)
    yield "exact_duplicates media", "exact_duplicates", {"content": "media"}, tuple(images[:1])
    yield "exact_duplicates pixels", "exact_duplicates", {"content": "pixels"}, tuple(images[:2])
    yield "exact_duplicates text", "exact_duplicates", {"content": "text"}, tuple(texts[:2])
    yield "image_duplicates phash 4", "image_duplicates", {}, tuple(images)
    yield "image_duplicates phash 8", "image_duplicates", {"radius": 8}, tuple(images)
    yield "image_duplicates dhash 4", "image_duplicates", {"method": "dhash"}, tuple(images)
    yield "embedding_duplicates thumbnail", "embedding_duplicates", {}, tuple(images)
    yield "text_duplicates", "text_duplicates", {}, tuple(texts)
    characters = {"unit": "characters", "shingle_size": 8, "threshold": 0.6, "num_bands": 28, "rows_per_band": 4}
    yield "text_duplicates 8 characters, 0.6", "text_duplicates", characters, tuple(texts)
    benchmarks = {"benchmarks": (directory / "benchmark.jsonl",)}
    yield "decontaminate", "decontaminate", benchmarks, ("benchmark question", "benchmark image")
    yield "image_content", "image_content", {}, ("uniform page", "tiny image")
    yield "image_size", "image_size", {}, ("tiny image",)
    yield "garbled_text", "garbled_text", {}, ("mojibake",)
    yield "repetition", "repetition", {}, ("one repeated phrase",)
    yield "boilerplate", "boilerplate", {}, ("list of URLs",)


def _figures(
    planted: PlantedSet, directory: Path, name: str, step_name: str, parameters: dict[str, Any], kinds: tuple[str, ...]
) -> Iterator[Figure]:
    dropped = apply_step(step_name, parameters, planted.records, directory)
    for kind in kinds:
        numbers = [number for number, other in enumerate(planted.kinds) if other == kind]
        found = sum(number in dropped for number in numbers)
        yield Figure(
            name=f"{name}: {kind}", value=found / len(numbers), unit="recall", note=f"{found} of {len(numbers)}"
        )
    if not any("duplicate" in drop.reason or "contaminated" in drop.reason for drop in dropped.values()):
        # Rules are right about further planted records, such as small ones, so that the other drops are the originals.
        dropped = {number: drop for number, drop in dropped.items() if planted.kinds[number] in ("", *kinds)}
    right = sum(_is_right(planted, number, drop, kinds) for number, drop in dropped.items())
    yield Figure(name=f"{name}: precision", value=right / max(1, len(dropped)), unit="precision",
                 note=f"{right} of {len(dropped)} dropped")  # fmt: skip
    if step_name == "decontaminate":
        kept = [number for number, kind in enumerate(planted.kinds) if kind.startswith("short question")]
        yield Figure(name=f"{name}: short questions kept", value=sum(number not in dropped for number in kept) / len(kept),
                     unit="share", at_least=1)  # fmt: skip


def _is_right(planted: PlantedSet, number: int, drop: Drop, kinds: tuple[str, ...]) -> bool:
    """Whether a drop is of a planted kind; for duplicates, whether the kept record has the same origin or template.

    Benchmark items are made from originals, so that these and their copies are contaminated too.
    """
    match = re.fullmatch(r"same as \d+:(\d+)", str(drop.value))
    if match:
        kept = int(match.group(1))
        same_template = planted.kinds[number] == planted.kinds[kept] and planted.kinds[number] in TEMPLATES
        return planted.origins[number] == planted.origins[kept] or same_template
    is_contaminated = "contaminated" in drop.reason and planted.origins[number] in planted.in_benchmark
    return planted.kinds[number] in kinds or is_contaminated


class ArraySignatures:
    """The protocol `Signatures` in memory."""

    def __init__(self, records: Sequence[Record], rows: Sequence[NDArray[np.uint8]]) -> None:
        counts = [len(part) for part in rows]
        self._numbers = np.repeat(np.array([record.number for record in records], np.uint64), counts)
        self._values = np.concatenate([part for part in rows if len(part)])
        self.num_rows, self.width = self._values.shape

    def blocks(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8]]]:
        yield self._numbers, np.zeros(len(self._numbers), np.uint32), self._values


def apply_step(name: str, parameters: dict[str, Any], records: Sequence[Record], directory: Path) -> dict[int, Drop]:
    """The records that a step drops, when it runs alone."""
    return {number: decision.drop for number, decision in decide(name, parameters, records, directory).items()
            if decision.drop is not None}  # fmt: skip


def decide(name: str, parameters: dict[str, Any], records: Sequence[Record], directory: Path) -> dict[int, Decision]:
    """The decisions of a step of either kind, by record number."""
    step = find_step(name)
    config = step.config(**parameters)
    context = Context(seed=0, cache=directory)
    if step.prepare is not None:
        step.prepare(config, context)
    if step.function is not None:
        outcomes = step.function(list(records), config, context)
        return {record.number: Decision(record.number, drop=outcome)
                for record, outcome in zip(records, outcomes, strict=True) if isinstance(outcome, Drop)}  # fmt: skip
    assert step.sign is not None
    assert step.decide is not None
    signatures: Any = ArraySignatures(records, step.sign(list(records), config, context))
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        return {found.number: found for found in step.decide(signatures, config, context, Path(scratch))}


def diversity() -> Iterator[Figure]:
    """Clusters and sampling on real digits with rare classes: how many of each class are kept, beside a uniform sample."""
    from sklearn.datasets import load_digits

    sizes = dict.fromkeys(range(6), 170) | {6: 60, 7: 30, 8: 15, 9: 8}
    digits = load_digits()
    records, classes = [], []
    for digit, size in sizes.items():
        for pixels in digits.images[digits.target == digit][:size]:
            image = Image.fromarray((pixels * 15.9).astype(np.uint8)).resize((32, 32), Image.Resampling.BICUBIC)
            records.append(Record(number=len(records), id="", body={}, media=(_png(image.convert("RGB")),)))
            classes.append(digit)
    with tempfile.TemporaryDirectory() as directory:
        found = decide("cluster", {"model": "thumbnail", "num_clusters": 30}, records, Path(directory))
        records = [record.with_facts(**found[record.number].facts) for record in records]
        parameters = {"share": 0.5}
        dropped = apply_step("cluster_sample", parameters, records, Path(directory))
    clusters = [str(record.facts["cluster"]) for record in records]
    members = {
        cluster: [classes[n] for n in range(len(clusters)) if clusters[n] == cluster] for cluster in set(clusters)
    }
    pure = sum(max(map(part.count, part)) for part in members.values()) / len(clusters)
    yield Figure(name=f"cluster: purity of {len(members)} clusters of digits", value=pure, unit="share")
    kept = [digit for number, digit in enumerate(classes) if number not in dropped]
    for digit in (0, 6, 7, 8, 9):
        yield Figure(name=f"cluster_sample: digit {digit} kept", value=kept.count(digit) / sizes[digit], unit="share",
                     rival="uniform sample", rival_value=len(kept) / len(classes),
                     note=f"{kept.count(digit)} of {sizes[digit]}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print_report(run(quick=options.quick), as_json=options.json)


if __name__ == "__main__":
    main()
