# SPDX-License-Identifier: Apache-2.0
"""Compose digits into an image of a number: one line, several lines, small on a large page, or one digit alone.

Comes after digits.py, before tasks.py. A page depends only on its generator, so the same (seed, index) gives the same
image on every machine.
"""

import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mindvl_cli.demo.digits import Scans, Split, draw_digit, random_style

Layout = Literal["line", "two_lines", "large", "small", "document", "digit"]
Box = tuple[int, int, int, int]

_NUM_SHARES = 10
_LINE_DIGITS = 3  # of a document
_SHORTEST_KEPT = 3  # there are too few shorter numbers to hold any out


@dataclass(frozen=True, kw_only=True)
class Page:
    """One image of a number; the digits are in reading order."""

    image: NDArray[np.uint8]  # [height, width, 3]
    number: str
    boxes: tuple[Box, ...]  # of each digit: left, top, right, bottom in pixels, right and bottom not included


def page_generator(seed: int, index: int) -> np.random.Generator:
    """The random numbers of image `index` of a series; independent of all other images."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, index))))


def number_split(number: str) -> Split:
    """Split of a number; numbers with one or two digits are in all splits and count as train."""
    return "train" if len(number) < _SHORTEST_KEPT else key_split(number)


def key_split(key: str) -> Split:
    """Put a text into a split by its checksum: one in ten is test, one in ten validation."""
    share = zlib.crc32(key.encode()) % _NUM_SHARES
    return "test" if share == 0 else "validation" if share == 1 else "train"


def random_number(generator: np.random.Generator, *, num_digits: int, split: Split) -> str:
    """Draw a number with exactly `num_digits` digits that the split may show; it never starts with 0."""
    while True:
        number = str(generator.integers(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits))
        if num_digits < _SHORTEST_KEPT or number_split(number) == split:
            return number


def compose_page(number: str, *, scans: Scans, layout: Layout, generator: np.random.Generator) -> Page:
    """Draw a number on a fresh page.

    Args:
        scans: Scans of the split; each digit of the number uses a random scan of it.
        layout: "line" (about 56 x 168 pixels, digits 28 to 46 high), "two_lines" (about 84 x 140), "large" (up to
            224 x 336 with digits of 20 to 32), "small" (about 28 x 84, digits 11 to 20), "document" (lines of up to three
            digits on 112 x 112 to 224 x 280, digits 20 to 34), "digit" (one digit that fills most of a page of 28 x 28
            to 58 x 58).
    """
    height, width, digit_height = _page_size(layout, len(number), generator)
    lines = _split_lines(number, layout, generator)
    inks = [[_random_ink(digit, scans, digit_height, generator) for digit in line] for line in lines]
    placed = _place(inks, height, width, generator)
    bottom = max(box[3] for _, box in placed)
    right = max(box[2] for _, box in placed)
    coverage = np.zeros((max(height, bottom + 1), max(width, right + 1)), np.uint8)
    for ink, (left, top, right, bottom) in placed:
        region = coverage[top:bottom, left:right]
        np.maximum(region, ink, out=region)
    return Page(image=_colour(coverage, generator), number=number, boxes=tuple(box for _, box in placed))


def _page_size(layout: Layout, num_digits: int, generator: np.random.Generator) -> tuple[int, int, float]:
    """Page height, page width and digit height in pixels."""
    first, second, third = generator.uniform(size=3)
    if layout == "digit":
        height = 28 + 30 * first
        return round(height), round(28 + 30 * second), max(13.0, height * (0.55 + 0.4 * third))
    if layout == "large":
        return round(112 + 112 * first), round(196 + 140 * second), 20 + 12 * third
    if layout == "document":
        return round(112 + 112 * first), round(112 + 168 * second), 20 + 14 * third
    if layout == "small":
        return round(24 + 10 * first), round(max(56, 16 * num_digits) + 28 * second), 11 + 9 * third
    if layout == "two_lines":
        height = round(84 + 28 * first)
        return height, round(112 + 56 * second), min(26 + 20 * third, 0.42 * height)
    # long numbers need smaller digits: about 0.8 of the height each, on at most 180 pixels
    tallest = min(46.0, 180 / (0.8 * num_digits))
    smallest = min(28.0, 0.85 * tallest)
    return round(52 + 10 * first), round(140 + 56 * second), smallest + (tallest - smallest) * third


def _split_lines(number: str, layout: Layout, generator: np.random.Generator) -> list[str]:
    if layout == "document":
        return [number[start : start + _LINE_DIGITS] for start in range(0, len(number), _LINE_DIGITS)]
    if layout != "two_lines" or len(number) < 2:
        return [number]
    cut = int(generator.integers(1, len(number)))
    if len(number) > 3:
        cut = len(number) // 2
    return [number[:cut], number[cut:]]


def _random_ink(digit: str, scans: Scans, height: float, generator: np.random.Generator) -> NDArray[np.uint8]:
    choices = scans.by_digit[int(digit)]
    scan = scans.images[choices[int(generator.integers(len(choices)))]]
    return draw_digit(scan, random_style(generator, height=height))


def _place(
    inks: list[list[NDArray[np.uint8]]], height: int, width: int, generator: np.random.Generator
) -> list[tuple[NDArray[np.uint8], Box]]:
    """Place every digit: lines share the height, digits of a line have a common baseline and small gaps."""
    placed: list[tuple[NDArray[np.uint8], Box]] = []
    top = 0
    for number, line in enumerate(inks):
        tallest = max(ink.shape[0] for ink in line)
        gaps = generator.uniform(0.06, 0.3, size=len(line)) * tallest
        length = sum(ink.shape[1] for ink in line) + float(gaps[1:].sum())
        room_below = height - top - sum(max(ink.shape[0] for ink in rest) + 3 for rest in inks[number:])
        line_top = top + 1 + int(generator.uniform() * max(0, room_below))
        left = 1 + generator.uniform() * max(0.0, width - 2 - length)
        jitter = generator.uniform(size=len(line))
        for ink, gap, shift in zip(line, gaps, jitter, strict=True):
            ink_top = line_top + int((tallest - ink.shape[0]) * shift)
            if ink is not line[0]:
                left += gap
            placed.append((ink, (int(left), ink_top, int(left) + ink.shape[1], ink_top + ink.shape[0])))
            left += ink.shape[1]
        top = line_top + tallest + 2
    return placed


def _colour(coverage: NDArray[np.uint8], generator: np.random.Generator) -> NDArray[np.uint8]:
    """Give the page a light paper and a dark ink, each with a slight tint."""
    paper = generator.uniform(220, 255) + generator.uniform(-8, 8, size=3)
    ink = generator.uniform(0, 70) + generator.uniform(-20, 50, size=3) * generator.uniform()
    levels = np.arange(256)[:, None] / 255
    table = np.clip(paper + (ink - paper) * levels, 0, 255).astype(np.uint8)  # [256, 3]
    # a palette lookup is much faster than numpy indexing
    image = Image.fromarray(coverage)
    image.putpalette(table.tobytes())
    return np.asarray(image.convert("RGB"))
