# SPDX-License-Identifier: Apache-2.0
"""Real input of the demo: scanned handwritten digits, split by scan and drawn at any size.

Comes first in the demo; pages.py composes the digits into images of numbers. The scans are the 1,797
8x8 images of scikit-learn's load_digits (UCI optical recognition of handwritten digits). The file names no writers,
so the split is by scan, the same share of every digit in each part.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Split = Literal["train", "validation", "test"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")

_SPLIT_SEED = 1797  # fixed: the test scans do not depend on the seed of a run
_VALIDATION_SHARE = 0.08
_TEST_SHARE = 0.12
_SCAN_SIDE = 8
_SCAN_MARGIN = 2  # empty pixels around a scan, so that bicubic drawing is not cropped
_INK_LEVEL = 48  # a drawn pixel at least this dark belongs to the digit's box


@dataclass(frozen=True, kw_only=True)
class Scans:
    """The scans of one split: `images[i]` is an ink map (255 = full ink) showing the digit `labels[i]`."""

    images: tuple[Image.Image, ...]
    labels: NDArray[np.int64]
    indices: NDArray[np.int64]  # index in load_digits, to check that splits share no scan
    by_digit: tuple[NDArray[np.int64], ...]  # by_digit[d]: positions in `images` that show d


@dataclass(frozen=True, kw_only=True)
class DigitStyle:
    """How one digit is drawn: height in pixels, rotation in degrees, shear and stretch as ratios, stroke weight."""

    height: float
    rotation: float = 0.0
    shear: float = 0.0
    stretch: float = 1.0  # width over height, relative to the scan
    weight: float = 1.0  # above 1: bolder strokes


@functools.cache
def load_scans(split: Split) -> Scans:
    """Load the scans of one split; every call returns the same object."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    indices = split_indices(bunch.target)[split]
    side = _SCAN_SIDE + 2 * _SCAN_MARGIN
    padded = np.zeros((len(indices), side, side), np.uint8)
    inner = slice(_SCAN_MARGIN, _SCAN_MARGIN + _SCAN_SIDE)
    padded[:, inner, inner] = np.round(bunch.images[indices] * (255 / 16))
    labels = bunch.target[indices].astype(np.int64)
    return Scans(
        images=tuple(Image.fromarray(scan) for scan in padded),
        labels=labels,
        indices=indices,
        by_digit=tuple(np.flatnonzero(labels == digit) for digit in range(10)),
    )


def split_indices(labels: Sequence[int] | NDArray[np.int64]) -> dict[Split, NDArray[np.int64]]:
    """Split scan numbers into train, validation and test, with the same share of every digit in each."""
    targets = np.asarray(labels)
    generator = np.random.default_rng(_SPLIT_SEED)
    parts: dict[Split, list[NDArray[np.int64]]] = {split: [] for split in SPLITS}
    for digit in range(10):
        order = generator.permutation(np.flatnonzero(targets == digit))
        num_test = round(_TEST_SHARE * len(order))
        num_validation = round(_VALIDATION_SHARE * len(order))
        parts["test"].append(order[:num_test])
        parts["validation"].append(order[num_test : num_test + num_validation])
        parts["train"].append(order[num_test + num_validation :])
    return {split: np.sort(np.concatenate(part)).astype(np.int64) for split, part in parts.items()}


def draw_digit(scan: Image.Image, style: DigitStyle) -> NDArray[np.uint8]:
    """Draw one scan as an ink map, cut to its ink.

    Returns:
        [h, w] uint8, 255 = full ink; h is close to `style.height`, rotation and shear make it differ a little.
    """
    scale = style.height / _SCAN_SIDE
    side = math.ceil(scale * (_SCAN_SIDE + _SCAN_MARGIN) * max(1.0, style.stretch)) + 2
    drawn = scan.transform(
        (side, side), Image.Transform.AFFINE, _inverse_map(style, scale, side), Image.Resampling.BICUBIC
    )
    ink = _weight_table(round(style.weight, 1))[np.asarray(drawn)]
    marked = ink >= _INK_LEVEL
    rows = np.flatnonzero(marked.any(axis=1))
    columns = np.flatnonzero(marked.any(axis=0))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def random_style(generator: np.random.Generator, *, height: float) -> DigitStyle:
    """Vary one digit a little: a few degrees, a slight slant, a slightly other width and pen."""
    rotation, shear, stretch, weight, size = generator.uniform(-1.0, 1.0, size=5)
    return DigitStyle(
        height=height * (1.0 + 0.08 * size),
        rotation=7.0 * rotation,
        shear=0.12 * shear,
        stretch=1.0 + 0.1 * stretch,
        weight=1.05 + 0.2 * weight,
    )


def _inverse_map(style: DigitStyle, scale: float, side: int) -> tuple[float, float, float, float, float, float]:
    """From a pixel of the drawing to a pixel of the scan, about both centres (the form PIL asks for)."""
    angle = math.radians(style.rotation)
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    # rotation first, then slant, then stretch
    a, b = (cos + style.shear * sin) / style.stretch, (sin - style.shear * cos) / style.stretch
    d, e = -sin, cos
    centre_out = side / 2
    centre_in = _SCAN_SIDE / 2 + _SCAN_MARGIN
    return (a, b, centre_in - (a + b) * centre_out, d, e, centre_in - (d + e) * centre_out)


@functools.cache
def _weight_table(weight: float) -> NDArray[np.uint8]:
    """Ink level after a pen of another weight, for each of the 256 levels."""
    levels = np.arange(256) / 255
    return np.round(255 * np.clip(levels * weight, 0, 1) ** (1 / weight)).astype(np.uint8)
