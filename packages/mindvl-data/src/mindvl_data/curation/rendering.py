# SPDX-License-Identifier: Apache-2.0
"""The step `render_text`: text -> images of this text in varied fonts, sizes, colors and backgrounds. B.1.2 (rendered text).

Comes after the readers of text and uses fonts.py; coverage.py renders rare words with the same functions.
"""

import io
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from mindvl_data.curation.documents import is_chinese, question_and_answer
from mindvl_data.curation.fonts import font_files, usable_fonts
from mindvl_data.curation.page_layout import is_wide
from mindvl_data.curation.record import Record
from mindvl_data.curation.scene_ocr import PROMPTS, PROMPTS_ZH
from mindvl_data.curation.step import Context, Drop, Outcome, Step

_CONTRAST = 96  # smallest difference of brightness between text and background
_LINE_HEIGHT = 1.35  # in font sizes
_TOKENS = re.compile(r"\s+|\S+")


@dataclass(frozen=True, kw_only=True)
class RenderConfig:
    """Parameters of rendered text.

    Attributes:
        fonts: Font files; by default DejaVu of an installed matplotlib. Chinese needs a font with Chinese characters.
        min_size, max_size: Limits of the font size in pixels.
        min_width, max_width: Limits of the width of an image in pixels; its height follows from the text.
        max_characters: Characters per image; longer texts are divided into several images.
    """

    fonts: tuple[Path, ...] = ()
    min_size: int = 16
    max_size: int = 40
    min_width: int = 320
    max_width: int = 896
    max_characters: int = 400

    def __post_init__(self) -> None:
        if not 6 <= self.min_size <= self.max_size <= 200:
            raise ValueError(
                f"min_size: {self.min_size} and max_size {self.max_size} must be from 6 to 200. Correct them."
            )
        if not 4 * self.max_size <= self.min_width <= self.max_width <= 4096:
            raise ValueError(
                f"min_width: {self.min_width} must be from 4 times max_size to max_width {self.max_width} <= 4096. Correct it."
            )
        if not 1 <= self.max_characters <= 4000:
            raise ValueError(f"max_characters: must be from 1 to 4000, got {self.max_characters}. Use 400.")


def _prepare(config: RenderConfig, context: Context) -> None:
    for path in font_files(config.fonts):
        usable_fonts("", [path], context)


@Step(
    config=RenderConfig,
    summary="Render texts into images with varied fonts, sizes, colors and backgrounds.",
    section="B.1.2",
    needs=("text",),
    reasons={
        "no_text": "The record has no text.",
        "missing_glyphs": "No font has all characters of the text; the value lists the missing ones.",
    },
    prepare=_prepare,
)
def render_text(records: list[Record], config: RenderConfig, context: Context) -> Sequence[Outcome]:
    """B.1.2: render the text of each record into one or more images with this text as the answer."""
    fonts = font_files(config.fonts)
    return [_rendered(record, fonts, config, context) for record in records]


def rendered_record(record: Record, text: str, font: str, config: RenderConfig, context: Context, name: str) -> Record:
    """A record with one image of a text; looks depend on the seed, the record and `name`."""
    chance = context.random(record, f"render {name}")
    image, shown = draw_text(text, font, config, chance)
    prompt = chance.choice(PROMPTS_ZH if is_chinese(text) else PROMPTS)
    body = {key: value for key, value in record.body.items() if key not in ("messages", "content")}
    body["messages"] = question_and_answer(prompt, shown)
    return replace(record.with_media((image,)), id=f"{record.id}:{name}", body=body, facts={})


def draw_text(text: str, font: str, config: RenderConfig, chance: random.Random) -> tuple[bytes, str]:
    """Draw a text.

    Returns:
        The image as JPEG, and the text with the line ends that the image shows.
    """
    size = chance.randint(config.min_size, config.max_size)
    width = chance.randint(config.min_width, config.max_width)
    face = ImageFont.truetype(font, size)
    margin = chance.randint(size // 2, 2 * size)
    lines = wrapped(text, face, width - 2 * margin)
    height = round(2 * margin + _LINE_HEIGHT * size * len(lines))
    pixels = background(width, height, chance)
    image = Image.fromarray(pixels)
    drawing = ImageDraw.Draw(image)
    color = _contrasting(float(pixels.mean()), chance)
    for index, line in enumerate(lines):
        drawing.text((margin, margin + round(_LINE_HEIGHT * size * index)), line, font=face, fill=color)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue(), "\n".join(lines)


def wrapped(text: str, face: ImageFont.FreeTypeFont, width: float) -> list[str]:
    """Break a text into lines of at most `width` pixels, between words, and between wide or too many characters."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for token in _breakable(paragraph, face, width):
            if line and face.getlength((line + token).rstrip()) > width:
                lines.append(line.rstrip())
                line = ""
            line += token.lstrip() if not line else token
        lines.append(line.rstrip())
    return [line for line in lines if line]


def background(width: int, height: int, chance: random.Random) -> NDArray[np.uint8]:
    """One of: one color, a gradient, noise, ruled paper; [H, W, 3]."""
    brightness = chance.randint(0, 90) if chance.random() < 0.25 else chance.randint(165, 255)
    base = np.clip(brightness + np.array([chance.randint(-25, 25) for _ in range(3)]), 0, 255)
    pixels = np.broadcast_to(base.astype(np.float32), (height, width, 3)).copy()
    kind = chance.choice(("plain", "gradient", "noise", "ruled"))
    if kind == "gradient":
        change = np.array([chance.randint(-30, 30) for _ in range(3)], np.float32)
        along = np.linspace(-0.5, 0.5, width if chance.random() < 0.5 else height, dtype=np.float32)
        pixels += (along[None, :, None] if len(along) == width else along[:, None, None]) * change
    elif kind == "noise":
        generator = np.random.default_rng(chance.getrandbits(64))
        pixels += generator.normal(0, chance.uniform(2, 12), (height, width, 1))
    elif kind == "ruled":
        pixels[chance.randint(0, 20) :: chance.randint(18, 48)] += -20 if base.mean() > 128 else 20
    return np.clip(pixels, 0, 255).astype(np.uint8)


def divided(text: str, max_characters: int) -> list[str]:
    """Divide a text between words into pieces of at most `max_characters`; longer words are cut."""
    pieces = [""]
    for token in _TOKENS.findall(text.strip()):
        for start in range(0, len(token), max_characters):
            part = token[start : start + max_characters]
            if len(pieces[-1]) + len(part) > max_characters:
                pieces.append("")
            pieces[-1] += part
    return [piece.strip() for piece in pieces if piece.strip()]


def _rendered(record: Record, fonts: Sequence[str], config: RenderConfig, context: Context) -> Outcome:
    text = record.text().strip()
    if not text:
        return Drop("no_text")
    usable, missing = usable_fonts(text, fonts, context)
    if not usable:
        return Drop("missing_glyphs", missing[:50])
    made: list[Record] = []
    for index, piece in enumerate(divided(text, config.max_characters)):
        font = context.random(record, f"font {index}").choice(usable)
        made.append(rendered_record(record, piece, font, config, context, f"image {index + 1}"))
    return made


def _breakable(paragraph: str, face: ImageFont.FreeTypeFont, width: float) -> list[str]:
    tokens: list[str] = []
    for token in _TOKENS.findall(paragraph):
        if any(map(is_wide, token)) or face.getlength(token) > width:
            tokens += list(token)
        else:
            tokens.append(token if not token.isspace() else " ")
    return tokens


def _contrasting(brightness: float, chance: random.Random) -> tuple[int, int, int]:
    """A color whose channels are all darker or all brighter than the background, on the side with more room."""
    low, high = (0, round(brightness) - _CONTRAST) if brightness > 127 else (round(brightness) + _CONTRAST, 255)
    if chance.random() < 0.5:
        return (max(0, low),) * 3 if brightness > 127 else (255, 255, 255)
    return chance.randint(max(0, low), high), chance.randint(max(0, low), high), chance.randint(max(0, low), high)
