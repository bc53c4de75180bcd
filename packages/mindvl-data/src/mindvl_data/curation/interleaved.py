# SPDX-License-Identifier: Apache-2.0
"""Image-text relevance in interleaved data (paper, appendix B.2.1): each image against the texts next to it, by CLIP.

Comes before judging.py, whose model is much slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindvl_data.curation.dialogue import turns
from mindvl_data.curation.record import Record
from mindvl_data.curation.scorers import ClipSimilarity, Item
from mindvl_data.curation.step import Context, Drop, Outcome, Step
from mindvl_data.errors import SampleError

_CHARACTERS = 300  # of a text next to an image; CLIP reads 77 tokens


@dataclass(frozen=True, kw_only=True)
class InterleavedRelevance:
    """Parameters of `interleaved_relevance`.

    Attributes:
        model: Directory of a CLIP, Chinese-CLIP or SigLIP model in transformers format.
        min_similarity: Lowest similarity of an image to the text before or after it. Default: 0.15, as MMC4 uses with
            CLIP ViT-L/14.
        irrelevant: What happens to images below it: `remove` them from records with `content`, and drop a record that has
            no other image; or `drop` the record. Records with `messages` are dropped in either case.
        device: Device of torch.
        batch_size: Pairs of image and text that the model processes at a time.
    """

    model: Path
    min_similarity: float = 0.15
    irrelevant: Literal["remove", "drop"] = "remove"
    device: str = "cpu"
    batch_size: int = 16

    def __post_init__(self) -> None:
        if not -1 <= self.min_similarity <= 1:
            raise ValueError(f"min_similarity: must be from -1 to 1, got {self.min_similarity}. Use for example 0.15.")
        if self.batch_size < 1:
            raise ValueError(f"batch_size: must be at least 1, got {self.batch_size}. Correct it.")


@Step(
    config=InterleavedRelevance,
    summary="Compare each image with the texts next to it by CLIP; remove irrelevant images or drop their records.",
    section="B.2.1",
    needs=("image", "text"),
    gives=("lowest_relevance", "images_removed"),
    reasons={"irrelevant_image": "An image is not relevant to the texts next to it, or none is."},
)
def interleaved_relevance(records: list[Record], config: InterleavedRelevance, context: Context) -> Sequence[Outcome]:
    """Measure how relevant each image is to the texts next to it, and remove or drop irrelevant ones (paper, B.2.1)."""
    key = ("clip", config.model, config.device, config.batch_size)
    scorer = context.resource(key, lambda: ClipSimilarity(config.model, config.device, config.batch_size))
    pairs = [[(image, text) for image, texts in enumerate(neighbours(record)) for text in texts] for record in records]
    items = [Item(record, image, text) for record, found in zip(records, pairs, strict=True) for image, text in found]
    scores = iter(scorer.score(items) if items else ())
    outcomes: list[Outcome] = []
    for record, found in zip(records, pairs, strict=True):
        best: dict[int, float] = {}
        for image, _ in found:
            best[image] = max(best.get(image, -1.0), next(scores))
        outcomes.append(_outcome(record, best, config))
    return outcomes


def neighbours(record: Record) -> list[list[str]]:
    """For each image the end of the text before it and the beginning of the text after it, where there are any.

    Raises:
        SampleError: The record has a video, or not as many images as placeholders.
    """
    parts = [part for _, content in turns(record) for part in content if isinstance(part, bytes) or part.strip()]
    found = []
    for place, part in enumerate(parts):
        if isinstance(part, str):
            continue
        before = next((one for one in reversed(parts[:place]) if isinstance(one, str)), "")
        after = next((one for one in parts[place + 1 :] if isinstance(one, str)), "")
        texts = [before.strip()[-_CHARACTERS:], after.strip()[:_CHARACTERS]]
        found.append([text for text in texts if text])
    return found


def _outcome(record: Record, best: dict[int, float], config: InterleavedRelevance) -> Outcome:
    if not best:
        return record  # without images, or without texts
    facts = {"image_relevance": [best[image] for image in sorted(best)], "lowest_relevance": min(best.values())}
    low = {image for image, score in best.items() if score < config.min_similarity}
    if not low:
        return record.with_facts(**facts, images_removed=0)
    if config.irrelevant == "drop" or "messages" in record.body or len(low) == len(record.media):
        return Drop("irrelevant_image", facts["lowest_relevance"], facts)
    return without_images(record, low).with_facts(**facts, images_removed=len(low))


def without_images(record: Record, numbers: set[int]) -> Record:
    """A copy of a record with `content` without some of its images, by position.

    Raises:
        SampleError: A point or box refers to an image.
    """
    content: list[Any] = []
    image = -1
    for part in record.body["content"]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("point", "box"):
            raise SampleError(f"an image cannot be removed from a record with a {kind}, which refers to it by position")
        image += kind == "image"
        if kind != "image" or image not in numbers:
            content.append(part)
    media = tuple(medium for number, medium in enumerate(record.media) if number not in numbers)
    return record.with_body(content=content).with_media(media)
