# SPDX-License-Identifier: Apache-2.0
"""Steps with scores of models: similarity of image and text, unsafe images, and any score of a user's model.

Comes after the rules, which are faster; the models are in scorers.py. A record without images passes. The score of a record
is that of its worst image.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindvl_data.curation.endpoint import Endpoint, EndpointConfig, check_endpoint
from mindvl_data.curation.image_rules import is_video
from mindvl_data.curation.limits import Limit, apply_limits
from mindvl_data.curation.record import Record
from mindvl_data.curation.scorers import (
    EXPOSED,
    ClipSimilarity,
    EndpointScorer,
    ImageClassifier,
    Item,
    NudeNet,
    OnnxScorer,
    Scorer,
)
from mindvl_data.curation.step import Context, Outcome, Step


@dataclass(frozen=True, kw_only=True)
class ClipScore:
    """Parameters of clip_similarity.

    Attributes:
        model: Directory of a CLIP, Chinese-CLIP or SigLIP model in transformers format.
        min_similarity: Cosine similarity of image and text. Default: 0.28, as LAION-5B uses with CLIP ViT-B/32 for English
            (0.26 for other languages); other models need other values. null: keep every pair with its similarity, so that
            the step `recaption` replaces the text of those below its own limit.
        device: Device of torch.
        batch_size: Images that the model processes at a time.
    """

    model: Path
    min_similarity: float | None = 0.28
    device: str = "cpu"
    batch_size: int = 16

    def __post_init__(self) -> None:
        if self.min_similarity is not None and not -1 <= self.min_similarity <= 1:
            raise ValueError(f"min_similarity: must be from -1 to 1, got {self.min_similarity}. Use for example 0.28.")
        _check_batch_size(self.batch_size)


@Step(
    config=ClipScore,
    summary="Drop records whose image and text have a low similarity.",
    section="B.1.1",
    needs=("image", "text"),
    gives=("clip_similarity",),
    reasons={"low_similarity": "The similarity of image and text is below min_similarity."},
    prepare=lambda config, context: _clip(config, context),
)
def clip_similarity(records: list[Record], config: ClipScore, context: Context) -> Sequence[Outcome]:
    """Measure the similarity of image and text, and drop pairs of low relevance (paper, B.1.1: CLIP scoring)."""
    values = _worst(records, _clip(config, context), min)
    limit = Limit("clip_similarity", config.min_similarity, None, "low_similarity", "")
    return apply_limits(records, {"clip_similarity": values}, (limit,))


def _clip(config: ClipScore, context: Context) -> Scorer:
    key = ("clip", config.model, config.device, config.batch_size)
    return context.resource(key, lambda: ClipSimilarity(config.model, config.device, config.batch_size))


@dataclass(frozen=True, kw_only=True)
class ImageScore:
    """Parameters of image_score. Exactly one of `transformers`, `onnx` and `endpoint` is given.

    Attributes:
        name: Name of the score, for example aesthetic, violence or watermark; the fact is NAME_score.
        min_score, max_score: Lowest and highest score that are kept.
        transformers: Directory of an image classifier in transformers format.
        label: Class of the classifier whose probability is the score; "" if the model has one output.
        onnx: ONNX file: images [N, 3, H, W] -> scores [N] or [N, C].
        column: Which of the C outputs is the score.
        size: Height and width in pixels if the ONNX model accepts any.
        mean, std: Mean and standard deviation that normalize the input of the ONNX model per channel; by default those of
            ImageNet.
        endpoint: A model behind an OpenAI-compatible endpoint.
        prompt: Question to the endpoint; it must ask for a number and nothing else; {text} is the text of the record.
        lowest, highest: Smallest and largest number that the endpoint may answer.
        device: Device of torch.
        batch_size: Images that a local model processes at a time.
    """

    name: str
    min_score: float | None = None
    max_score: float | None = None
    transformers: Path | None = None
    label: str = ""
    onnx: Path | None = None
    column: int = 0
    size: int = 224
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    endpoint: EndpointConfig | None = None
    prompt: str = ""
    lowest: float = 0.0
    highest: float = 10.0
    device: str = "cpu"
    batch_size: int = 16

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(
                f"name: {self.name!r} is not a name of letters and underscores. Use for example aesthetic."
            )
        given = [name for name in ("transformers", "onnx", "endpoint") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"transformers, onnx, endpoint: {len(given)} of them are given. Give exactly one.")
        if self.endpoint is not None and not self.prompt:
            raise ValueError("prompt: an endpoint needs a question. Ask for a number and nothing else.")
        if self.min_score is not None and self.max_score is not None and self.min_score > self.max_score:
            raise ValueError(f"min_score: {self.min_score} is larger than max_score, {self.max_score}. Lower it.")
        _check_batch_size(self.batch_size)


def _prepare_image_score(config: ImageScore, context: Context) -> None:
    if config.endpoint is not None:
        check_endpoint(config.endpoint)
    else:
        _image_scorer(config, context)


@Step(
    config=ImageScore,
    summary="Drop images by a score of a model, for example for aesthetics, violence or watermarks.",
    section="B.1.1",
    needs=("image",),
    reasons={
        "low_score": "The score is below min_score.",
        "high_score": "The score is above max_score.",
    },
    prepare=_prepare_image_score,
)
def image_score(records: list[Record], config: ImageScore, context: Context) -> Sequence[Outcome]:
    """Score images by a user's model (paper, B.1.1: aesthetic, pornography and violence, and watermark scoring)."""
    fact = f"{config.name}_score"
    limit = Limit(fact, config.min_score, config.max_score, "low_score", "high_score")
    scorer = _image_scorer(config, context)
    choose = min if config.min_score is not None else max
    return apply_limits(records, {fact: _worst(records, scorer, choose)}, (limit,))


def _image_scorer(config: ImageScore, context: Context) -> Scorer:
    def build() -> Scorer:
        if config.transformers is not None:
            return ImageClassifier(config.transformers, config.label, config.device, config.batch_size)
        if config.onnx is not None:
            return OnnxScorer(config.onnx, config.column, config.size, config.mean, config.std, config.batch_size)
        assert config.endpoint is not None
        return EndpointScorer(Endpoint.of(config.endpoint, context), config.prompt, config.lowest, config.highest)

    return context.resource(("image score", repr(config)), build)


@dataclass(frozen=True)
class NsfwScore:
    """Parameters of nsfw_score.

    Attributes:
        max_score: Highest probability of an exposed body part that is kept. The detector reports nothing below 0.2.
        classes: Classes of NudeNet's detector that count.
    """

    max_score: float = 0.5
    classes: tuple[str, ...] = EXPOSED

    def __post_init__(self) -> None:
        if not 0 <= self.max_score <= 1:
            raise ValueError(f"max_score: must be from 0 to 1, got {self.max_score}. Use for example 0.5.")


@Step(
    config=NsfwScore,
    summary="Drop images in which NudeNet detects nudity.",
    section="B.1.1",
    needs=("image",),
    gives=("nsfw_score",),
    reasons={"nudity": "The probability of an exposed body part is above max_score."},
    extra="nsfw",
    prepare=lambda config, context: _nudenet(config, context),
)
def nsfw_score(records: list[Record], config: NsfwScore, context: Context) -> Sequence[Outcome]:
    """Drop images with nudity, by the detector of NudeNet (paper, B.1.1: pornography scoring)."""
    limit = Limit("nsfw_score", None, config.max_score, "", "nudity")
    return apply_limits(records, {"nsfw_score": _worst(records, _nudenet(config, context), max)}, (limit,))


def _nudenet(config: NsfwScore, context: Context) -> Scorer:
    return context.resource(("nudenet", config.classes), lambda: NudeNet(config.classes))


def _worst(records: Sequence[Record], scorer: Scorer, choose: Callable[[list[float]], float]) -> list[float | None]:
    """The score of each record's worst image; None without images."""
    items = [
        Item(record, index, "\n".join(record.answers()))
        for record in records
        for index, content in enumerate(record.media)
        if not is_video(content)
    ]
    by_record: dict[int, list[float]] = {}
    for item, score in zip(items, scorer.score(items) if items else (), strict=True):
        by_record.setdefault(id(item.record), []).append(score)
    return [choose(found) if (found := by_record.get(id(record))) else None for record in records]


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size: must be at least 1, got {batch_size}. Use for example 16.")
