# SPDX-License-Identifier: Apache-2.0
"""Assign each record to one capability of a taxonomy (paper, appendix B.3), by keywords, a local model, or an endpoint.

Comes before class_sampling.py, which samples by the fact `capability`.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mindvl_data.curation.dialogue import Language
from mindvl_data.curation.endpoint import Endpoint, EndpointConfig, Question, check_endpoint
from mindvl_data.curation.judging import sample_parts
from mindvl_data.curation.model_replies import one_of
from mindvl_data.curation.prompt_texts import check_prompts, default_prompt, filled, prompt_for
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Outcome, Step
from mindvl_data.errors import DataError

# The default capabilities follow the classes in which the paper groups its data: the categories of appendix B.1 and B.2, the
# ablation in appendix C.2 (video, captions, OCR, GUI, math, knowledge, grounding, general VQA), and the text data of B.3.
TAXONOMY = {
    "caption": "describing an image or its parts, briefly or in detail",
    "ocr": "reading or locating text in documents, scenes, handwriting and formulas",
    "table_chart": "recognising, converting or answering questions about tables and charts",
    "grounding": "finding, pointing to or describing regions, with boxes or points",
    "counting": "counting objects",
    "gui": "reading, locating, explaining or operating elements of a user interface",
    "math": "mathematical problems, geometry and functions",
    "stem": "science, technology and engineering, from school to university, except pure mathematics",
    "code": "writing, explaining or correcting code, including code of a page or chart that an image shows",
    "knowledge": "facts about the world: people, places, works, history, species, products",
    "general_vqa": "questions about what an image shows: objects, attributes, relations, actions, reasons",
    "multi_image": "comparing or relating several images",
    "video": "describing or answering questions about a video",
    "conversation": "dialogue, writing and instructions that need no image",
}
OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class KeywordClassifier:
    """The capability with the most phrases in the texts of the record; the earlier one if two have the same number.

    Attributes:
        rules: JSON file: capability -> list of phrases, in any case. A phrase of letters and digits matches whole words.
    """

    kind: Literal["keywords"] = "keywords"
    rules: Path


@dataclass(frozen=True, kw_only=True)
class ModelClassifier:
    """A transformers directory with a sequence classification model, which reads the texts of the record on the CPU.

    Attributes:
        directory: Directory with config.json, safetensors and tokenizer.
        labels: Label of the model -> capability; labels that are not named are capabilities themselves.
        min_score: Lowest probability; below it the capability is `other`.
        max_tokens: Longest text in tokens; the rest is cut.
    """

    kind: Literal["model"] = "model"
    directory: Path
    labels: dict[str, str] = field(default_factory=dict)
    min_score: float = 0.0
    max_tokens: int = 512


@dataclass(frozen=True, kw_only=True)
class EndpointClassifier:
    """A model behind an endpoint, which sees texts and images and replies with a name.

    Attributes:
        endpoint: The model.
        language: Language of the prompt: en, zh, or that of each record (fact `language`).
        prompt_en, prompt_zh: Prompts with {capabilities}, after the sample.
        max_images: Records with more images fail.
        max_tokens: Longest reply.
    """

    kind: Literal["endpoint"] = "endpoint"
    endpoint: EndpointConfig
    language: Language = "record"
    prompt_en: str = default_prompt("classify", "en")
    prompt_zh: str = default_prompt("classify", "zh")
    max_images: int = 16
    max_tokens: int = 64

    def __post_init__(self) -> None:
        check_prompts(self, "capabilities")


@dataclass(frozen=True, kw_only=True)
class Classify:
    """Parameters of `classify`.

    Attributes:
        classifier: Its `kind` is keywords, model or endpoint; the other keys are the parameters of this kind.
        taxonomy: Capability -> description.
    """

    classifier: KeywordClassifier | ModelClassifier | EndpointClassifier
    taxonomy: dict[str, str] = field(default_factory=lambda: dict(TAXONOMY))

    def __post_init__(self) -> None:
        if not self.taxonomy or OTHER in self.taxonomy:
            raise ValueError(f"taxonomy: must name capabilities other than {OTHER!r}. Add or rename one.")


def _prepare(config: Classify, context: Context) -> None:
    classifier = config.classifier
    if isinstance(classifier, EndpointClassifier):
        check_endpoint(classifier.endpoint)
    elif isinstance(classifier, KeywordClassifier):
        read_rules(classifier.rules, config.taxonomy)
    elif not (classifier.directory / "config.json").is_file():
        raise DataError(f"{classifier.directory}: config.json does not exist. Name a directory of transformers.")


@Step(
    config=Classify,
    summary="Assign each record to a capability, by keywords, a local model or an endpoint.",
    section="B.3",
    needs=("text",),
    gives=("capability", "modality"),
    prepare=_prepare,
)
def classify(records: list[Record], config: Classify, context: Context) -> Sequence[Outcome]:
    """Add the facts `capability` and `modality` (paper, appendix B.3)."""
    classifier = config.classifier
    if isinstance(classifier, KeywordClassifier):
        key: tuple[str, ...] = ("keywords", str(classifier), *config.taxonomy)
        rules = context.resource(key, lambda: read_rules(classifier.rules, config.taxonomy))
        found = [most_phrases(record.text(), rules) for record in records]
    elif isinstance(classifier, ModelClassifier):
        key = ("classifier", str(classifier), *config.taxonomy)
        model = context.resource(key, lambda: load_model(classifier, config.taxonomy))
        found = [model(record.text()) for record in records]  # one by one: padding may change the last bits of a score
    else:
        found = _by_endpoint(records, classifier, config.taxonomy, context)
    return [
        record.with_facts(capability=name, modality=modality(record))
        for record, name in zip(records, found, strict=True)
    ]


def modality(record: Record) -> str:
    """`text`, `image`, `multi_image` or `video`, by the placeholders of the record."""
    contents = [turn.get("content") for turn in record.body.get("messages") or ()] + [record.body.get("content")]
    kinds = [
        part["type"]
        for content in contents
        if isinstance(content, list)
        for part in content
        if isinstance(part, dict) and part.get("type") in ("image", "video")
    ]
    if "video" in kinds:
        return "video"
    return ("text", "image")[len(kinds)] if len(kinds) < 2 else "multi_image"


Rules = list[tuple[str, "re.Pattern[str]"]]


def read_rules(path: Path, taxonomy: dict[str, str]) -> Rules:
    """A file of phrases as (capability, pattern), in the order of the taxonomy.

    Raises:
        DataError: The file cannot be read, or names another capability.
    """
    try:
        rules = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the rules cannot be read: {error}. Correct the file.") from error
    is_valid = isinstance(rules, dict) and all(
        isinstance(phrases, list) and phrases and all(isinstance(phrase, str) and phrase.strip() for phrase in phrases)
        for phrases in rules.values()
    )
    if not is_valid:
        raise DataError(f'{path}: expected an object like {{"ocr": ["read the text"]}}. Correct the file.')
    unknown = sorted(set(rules) - set(taxonomy))
    if unknown:
        raise DataError(f"{path}: {unknown[0]!r} is not in the taxonomy. Use one of {', '.join(taxonomy)}.")
    return [(name, _pattern(rules[name])) for name in taxonomy if name in rules]


def most_phrases(text: str, rules: Rules) -> str:
    """The capability with the most matches; `other` without any."""
    text = text.casefold()
    best, most = OTHER, 0
    for name, pattern in rules:
        count = sum(1 for _ in pattern.finditer(text))
        if count > most:
            best, most = name, count
    return best


def load_model(config: ModelClassifier, taxonomy: dict[str, str]) -> Callable[[str], str]:
    """A function from a text to a capability.

    Raises:
        DataError: The directory is not such a model, or a label is not a capability.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(config.directory, local_files_only=True)
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            config.directory, local_files_only=True, use_safetensors=True, dtype=torch.float32
        ).eval()
    except (OSError, ValueError) as error:
        raise DataError(
            f"{config.directory}: the classifier cannot be loaded: {error}. Check the directory."
        ) from error
    names = {index: config.labels.get(label, label) for index, label in model.config.id2label.items()}
    unknown = sorted(set(names.values()) - {*taxonomy, OTHER})
    if unknown:
        raise DataError(f"{config.directory}: the label {unknown[0]!r} is not in the taxonomy. Map it in labels.")

    def run(text: str) -> str:
        inputs = tokenizer(text, truncation=True, max_length=config.max_tokens, return_tensors="pt")
        with torch.inference_mode():
            scores = model(**inputs).logits[0].softmax(-1)
        best = int(scores.argmax())
        return names[best] if round(float(scores[best]), 4) >= config.min_score else OTHER

    return run


def _by_endpoint(
    records: list[Record], classifier: EndpointClassifier, taxonomy: dict[str, str], context: Context
) -> list[str]:
    capabilities = "\n".join(f"- {name}: {description}" for name, description in taxonomy.items())

    def question(record: Record) -> Question:
        prompt = filled(prompt_for(record, classifier), capabilities=capabilities)
        return Question([*sample_parts(record, classifier.max_images), prompt], classifier.max_tokens)

    replies = Endpoint.of(classifier.endpoint, context).ask_each(records, question)
    return [one_of(reply, tuple(taxonomy)) for reply in replies if reply is not None]


def _pattern(phrases: Sequence[str]) -> "re.Pattern[str]":
    found = []
    for phrase in sorted({phrase.strip().casefold() for phrase in phrases}, key=lambda phrase: (-len(phrase), phrase)):
        before = r"(?<![a-z0-9])" if phrase[0].isascii() and phrase[0].isalnum() else ""
        after = r"(?![a-z0-9])" if phrase[-1].isascii() and phrase[-1].isalnum() else ""
        found.append(before + re.escape(phrase) + after)
    return re.compile("|".join(found))
