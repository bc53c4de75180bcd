# SPDX-License-Identifier: Apache-2.0
"""Steps for documents: PDF -> image-text pairs page by page, or interleaved text and images; cleaning; filter. B.1.2.

Comes after the readers, which pass a PDF as the only medium of a record; uses pdf.py, page_layout.py and page_markdown.py.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from mindvl_data.curation.document_rules import clean_text, garbled_share
from mindvl_data.curation.page_layout import Block, is_wide
from mindvl_data.curation.page_markdown import document_blocks, to_markdown
from mindvl_data.curation.pdf import Figure, Page, PdfLimits, read_pages
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop, Outcome, Step
from mindvl_data.errors import SampleError

PROMPTS = (
    "Convert this page to Markdown.",
    "Read all the text on this page. Answer in Markdown.",
    "Transcribe the page in reading order, with headings, lists and tables in Markdown.",
    "What is written on this page?",
)
PROMPTS_ZH = (
    "\u5c06\u6b64\u9875\u8f6c\u6362\u4e3a Markdown\u3002",
    "\u8bfb\u51fa\u6b64\u9875\u7684\u5168\u90e8\u6587\u5b57\uff0c\u7528 Markdown \u56de\u7b54\u3002",
    "\u6309\u9605\u8bfb\u987a\u5e8f\u8f6c\u5199\u6b64\u9875\uff0c"
    "\u7528 Markdown \u8868\u793a\u6807\u9898\u3001\u5217\u8868\u548c\u8868\u683c\u3002",
    "\u8fd9\u4e00\u9875\u4e0a\u5199\u4e86\u4ec0\u4e48\uff1f",
)
_CHINESE = 0.3  # share of wide characters from which a text gets Chinese prompts
_REPEATED_IMAGE = 3  # an image on so many pages is a logo


@dataclass(frozen=True, kw_only=True)
class PdfPagesConfig(PdfLimits):
    """Parameters of the step `pdf_pages`.

    Attributes:
        dpi: Resolution of the images in pixels per inch; at 144, text of 10 points is about 20 pixels high.
    """

    dpi: int = 144

    def __post_init__(self) -> None:
        if not 18 <= self.dpi <= 600:
            raise ValueError(f"dpi: must be from 18 to 600, got {self.dpi}. Use 144 for text of normal size.")


@dataclass(frozen=True, kw_only=True)
class PdfInterleavedConfig(PdfLimits):
    """Parameters of the step `pdf_interleaved`.

    Attributes:
        pages_per_record: Consecutive pages that become one record.
        max_images_per_record: Images after this number start a new record.
    """

    pages_per_record: int = 8
    max_images_per_record: int = 8

    def __post_init__(self) -> None:
        for name in ("pages_per_record", "max_images_per_record"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}. Use a positive number.")


@dataclass(frozen=True, kw_only=True)
class CleanDocumentConfig:
    """Parameters of the step `clean_document`.

    Attributes:
        keep_image_markers: Keep `![...](...)` and `<img>`, which pairs of one image and one text must not contain.
    """

    keep_image_markers: bool = False


@dataclass(frozen=True, kw_only=True)
class DocumentTextConfig:
    """Parameters of the step `document_text`.

    Attributes:
        min_characters: Minimum number of characters in all answers, without spaces.
        max_characters: Maximum number of characters in all answers, without spaces.
        max_garbled: Maximum share of characters that are signs of a broken encoding.
        need_image: Drop records whose text remains without an image (text-only documents in interleaved data).
    """

    min_characters: int = 20
    max_characters: int = 20_000
    max_garbled: float = 0.02
    need_image: bool = True


def prompt_for(text: str, context: Context) -> str:
    """One of the prompts for reading a text, in the language of the text.

    The choice depends on the seed and the text, so that pages with the same text stay equal and are found as duplicates.
    """
    chosen = blake2b(f"{context.seed}/{text}".encode("utf-8", "replace"), digest_size=8).digest()
    prompts = PROMPTS_ZH if is_chinese(text) else PROMPTS
    return prompts[int.from_bytes(chosen, "little") % len(prompts)]


def is_chinese(text: str) -> bool:
    """True if many characters are written without spaces between words."""
    visible = [character for character in text if not character.isspace()]
    return bool(visible) and sum(map(is_wide, visible)) > _CHINESE * len(visible)


def question_and_answer(prompt: str, answer: str) -> list[dict[str, Any]]:
    """The messages of a record with one image."""
    return [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]


@Step(
    config=PdfPagesConfig,
    summary="Render each page of a PDF and extract its text as Markdown: one image-text pair per page.",
    section="B.1.2",
    needs=("document",),
    gives=("page",),
)
def pdf_pages(records: list[Record], config: PdfPagesConfig, context: Context) -> Sequence[Outcome]:
    """B.1.2: each page of a PDF becomes a pair of its image and its text as Markdown, without markers of images.

    A page without text (a scan) becomes a record with an empty answer; fill it by `scene_ocr`, or drop it by `document_text`.
    """
    return [_pages_of(record, config, context) for record in records]


@Step(
    config=PdfInterleavedConfig,
    summary="Extract the text of a PDF as Markdown with its embedded images in reading order.",
    section="B.1.2",
    needs=("document",),
    gives=("page", "num_images"),
    reasons={"text_only": "The document has no embedded image."},
)
def pdf_interleaved(records: list[Record], config: PdfInterleavedConfig, context: Context) -> Sequence[Outcome]:
    """B.1.2: the text of a PDF as Markdown with its embedded images at their places in reading order.

    Images that are repeated on several pages (logos) and images of whole pages (scans) are left out. A document without
    images is dropped; so are parts without images of a document that has some.
    """
    return [_interleaved_of(record, config) for record in records]


@Step(
    config=CleanDocumentConfig,
    summary="Clean texts of documents: characters, spaces, ligatures, hyphens at line ends, image markers.",
    section="B.1.2",
    needs=("text",),
)
def clean_document(records: list[Record], config: CleanDocumentConfig, context: Context) -> Sequence[Outcome]:
    """B.1.2: apply the rules of document_rules.py to all texts, for documents that did not come from a PDF."""
    return [record.map_texts(lambda text: clean_text(text, config.keep_image_markers)) for record in records]


@Step(
    config=DocumentTextConfig,
    summary="Drop pages and documents without text, with garbled text, or with text of an unusual length.",
    section="B.1.2",
    needs=("text",),
    gives=("num_characters", "garbled"),
    reasons={
        "no_text": "The page has no text.",
        "short": "The text has less than min_characters characters.",
        "long": "The text has more than max_characters characters.",
        "garbled": "More than max_garbled of the characters are signs of a broken encoding.",
        "text_only": "The record has no image.",
    },
)
def document_text(records: list[Record], config: DocumentTextConfig, context: Context) -> Sequence[Outcome]:
    """B.1.2: drop pages without text, with too much text, and with garbled text; text-only documents."""
    return [_checked(record, config) for record in records]


def _checked(record: Record, config: DocumentTextConfig) -> Outcome:
    text = "\n".join(record.answers())
    characters, garbled = sum(not character.isspace() for character in text), round(garbled_share(text), 4)
    facts = {"num_characters": characters, "garbled": garbled}
    if config.need_image and not record.media:
        return Drop("text_only", 0, facts)
    if characters == 0:
        return Drop("no_text", 0, facts)
    if characters < config.min_characters:
        return Drop("short", characters, facts)
    if characters > config.max_characters:
        return Drop("long", characters, facts)
    if garbled > config.max_garbled:
        return Drop("garbled", garbled, facts)
    return record.with_facts(**facts)


def _document(record: Record) -> bytes:
    if len(record.media) != 1 or b"%PDF-" not in record.media[0][:1024]:
        raise SampleError("the record is not a PDF: a document must be its only medium and begin with %PDF-")
    return record.media[0]


def _pages_of(record: Record, config: PdfPagesConfig, context: Context) -> list[Record]:
    pages = list(read_pages(_document(record), config, dpi=config.dpi))
    blocks, sizes, words = document_blocks(pages)
    made: list[Record] = []
    for index, (page, found) in enumerate(zip(pages, blocks, strict=True)):
        text = "\n\n".join(part for part in to_markdown(found, sizes, words) if isinstance(part, str))
        child = _child(record, index, f"page {page.number}", (page.image,))
        messages = question_and_answer(prompt_for(text, context), text)
        made.append(child.with_body(messages=messages).with_facts(page=page.number))
    return made


def _child(record: Record, piece: int, name: str, media: tuple[bytes, ...]) -> Record:
    body = {key: value for key, value in record.body.items() if key not in ("messages", "content")}
    return replace(record.with_media(media), piece=piece, id=f"{record.id}:{name}", body=body)


def _interleaved_of(record: Record, config: PdfInterleavedConfig) -> Outcome:
    pages = list(read_pages(_document(record), config, figures=True))
    repeated = _repeated_images(pages)
    pages = [replace(page, figures=tuple(f for f in page.figures if _digest(f) not in repeated)) for page in pages]
    num_images = sum(len(page.figures) for page in pages)
    if not num_images:
        return Drop("text_only", 0, {"num_images": 0})
    blocks, sizes, words = document_blocks(pages)
    made: list[Record] = []
    for start in range(0, len(pages), config.pages_per_record):
        group: list[Block] = [block for page in blocks[start : start + config.pages_per_record] for block in page]
        for parts in _divided(to_markdown(group, sizes, words), config.max_images_per_record):
            media = tuple(part.content for part in parts if isinstance(part, Figure))
            if not media:
                continue
            content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
            child = _child(record, len(made), f"part {len(made) + 1}", media)
            made.append(child.with_body(content=_separated(content)).with_facts(page=start + 1, num_images=len(media)))
    return made


def _divided(parts: list[str | Figure], max_images: int) -> list[list[str | Figure]]:
    """Parts in groups of at most `max_images` images; a group ends before the image that is too many."""
    groups: list[list[str | Figure]] = [[]]
    for part in parts:
        full = sum(isinstance(other, Figure) for other in groups[-1]) == max_images
        if full and isinstance(part, Figure):
            groups.append([])
        groups[-1].append(part)
    return groups


def _separated(content: list[dict[str, str]]) -> list[dict[str, str]]:
    """Put empty lines between texts and images, which a tokenizer joins without a space."""
    separated: list[dict[str, str]] = []
    for index, part in enumerate(content):
        if part["type"] == "text":
            before = "\n\n" if index else ""
            after = "\n\n" if index + 1 < len(content) else ""
            part = {"type": "text", "text": before + part["text"] + after}
        separated.append(part)
    return separated


def _digest(figure: Figure) -> bytes:
    return blake2b(figure.content, digest_size=16).digest()


def _repeated_images(pages: Sequence[Page]) -> set[bytes]:
    counts = Counter(digest for page in pages for digest in {_digest(figure) for figure in page.figures})
    return {digest for digest, count in counts.items() if count >= _REPEATED_IMAGE}
