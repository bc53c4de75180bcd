# SPDX-License-Identifier: Apache-2.0
"""Regions of images, a phrase with a box or a mask, from the formats of COCO, GRIT (Kosmos-2), Florence-2, and our parts.

Used by grounding.py. All coordinates are returned in pixels of the upright image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from mindvl_data.errors import SampleError

Box = tuple[float, float, float, float]
_MAX_REGIONS = 2000
_MAX_MASK_PIXELS = 80_000_000


@dataclass(frozen=True)
class Region:
    """A phrase and where it is: a box x1, y1, x2, y2, and a point inside of the object if a mask or point is known."""

    phrase: str
    xyxy: Box
    point: tuple[float, float] | None = None


def regions_of(body: Mapping[str, Any], width: int, height: int) -> list[Region]:
    """Regions of a record, whatever format its fields have.

    Recognized are `regions` [{"phrase", "xyxy", "xy"}], `annotations` (COCO: `bbox`, `segmentation`, and `caption`,
    `phrase` or `category` of each), `noun_chunks` and `ref_exps` with `caption` (GRIT), `bboxes` with `labels`
    (Florence-2), and `content` whose text parts are followed by box parts.

    Args:
        body: Body of the record.
        width, height: Size of the upright image in pixels.

    Raises:
        SampleError: The fields do not have the form of their format.
    """
    try:
        if "regions" in body:
            found = [Region(str(one["phrase"]), _box(one["xyxy"]), _point(one.get("xy"))) for one in body["regions"]]
        elif "annotations" in body:
            names = {one["id"]: one["name"] for one in body.get("categories") or ()}
            found = [_coco(one, names, width, height) for one in body["annotations"]]
        elif "noun_chunks" in body or "ref_exps" in body:
            found = _grit(body, width, height)
        elif "bboxes" in body:
            pairs = zip(body["labels"], body["bboxes"], strict=True)
            found = [Region(str(label), _box(box)) for label, box in pairs]
        else:
            found = _parts(body.get("content"))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise SampleError(
            f"the regions of the record do not have a known form ({type(error).__name__}: {error})"
        ) from error
    if len(found) > _MAX_REGIONS:
        raise SampleError(f"the record has {len(found)} regions, the limit is {_MAX_REGIONS}")
    return found


def inside(region: Region, width: int, height: int, min_side: float) -> Region | None:
    """The region within the image; None if its box is not a box, or smaller than `min_side` pixels in the image."""
    x1, y1, x2, y2 = region.xyxy
    box = max(x1, 0.0), max(y1, 0.0), min(x2, float(width)), min(y2, float(height))
    if not all(np.isfinite(region.xyxy)) or box[2] - box[0] < min_side or box[3] - box[1] < min_side:
        return None
    point = region.point
    if point is not None and not (box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]):
        point = None
    return Region(" ".join(region.phrase.split()), box, point) if region.phrase.strip() else None


def point_of(region: Region) -> tuple[float, float]:
    """The point of the region, by default the center of its box."""
    x1, y1, x2, y2 = region.xyxy
    return region.point or ((x1 + x2) / 2, (y1 + y2) / 2)


def point_in_mask(mask: NDArray[np.bool_]) -> tuple[float, float] | None:
    """The pixel of a mask [H, W] that is nearest to its centroid, as x and y; None for an empty mask."""
    rows, columns = np.nonzero(mask)
    if not len(rows):
        return None
    distance = (rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2
    nearest = int(distance.argmin())
    return float(columns[nearest]) + 0.5, float(rows[nearest]) + 0.5


def decode_mask(segmentation: Any, width: int, height: int) -> NDArray[np.bool_]:
    """A mask [H, W] from COCO's polygons, run lengths, or compressed run lengths.

    Raises:
        SampleError: The segmentation has another size.
    """
    if width * height > _MAX_MASK_PIXELS:
        raise SampleError(f"a mask of {width} x {height} pixels")
    if isinstance(segmentation, list):
        image = Image.new("1", (width, height))
        for polygon in segmentation:
            if len(polygon) >= 6:
                ImageDraw.Draw(image).polygon([float(value) for value in polygon], fill=1)
        return np.array(image, bool)
    rows, columns = (int(value) for value in segmentation["size"])
    if (rows, columns) != (height, width):
        raise SampleError(f"a mask of {columns} x {rows} pixels for an image of {width} x {height}")
    counts = segmentation["counts"]
    runs = counts if isinstance(counts, list) else _run_lengths(counts)
    if sum(runs) != width * height or min(runs, default=0) < 0:
        raise SampleError("run lengths that do not fill the mask")
    values = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return values.reshape(width, height).T  # run lengths go down the columns


def _run_lengths(text: str | bytes) -> list[int]:
    """Run lengths from COCO's compressed text: 5 bits per character, from the third on as differences to two before."""
    data = text.encode() if isinstance(text, str) else text
    runs: list[int] = []
    value = shift = 0
    for byte in data:
        code = byte - 48
        value |= (code & 0x1F) << shift
        shift += 5
        if not code & 0x20:
            if code & 0x10:
                value -= 1 << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return runs


def _box(values: Sequence[Any]) -> Box:
    x1, y1, x2, y2 = (float(value) for value in values)
    return x1, y1, x2, y2


def _point(values: Sequence[Any] | None) -> tuple[float, float] | None:
    if values is None:
        return None
    x, y = (float(value) for value in values)
    return x, y


def _coco(one: Mapping[str, Any], names: Mapping[Any, str], width: int, height: int) -> Region:
    x, y, wide, high = (float(value) for value in one["bbox"])
    phrase = one.get("phrase") or one.get("caption") or one.get("category") or names.get(one.get("category_id"), "")
    segmentation = one.get("segmentation")
    point = point_in_mask(decode_mask(segmentation, width, height)) if segmentation else None
    return Region(str(phrase), (x, y, x + wide, y + high), point)


def _grit(body: Mapping[str, Any], width: int, height: int) -> list[Region]:
    """Phrases are given by first and last character in the caption, boxes as shares of the image's width and height."""
    listed = [*(body.get("noun_chunks") or ()), *(body.get("ref_exps") or ())]
    spans = {tuple(float(value) for value in one[:6]) for one in listed}
    found: list[Region] = []
    for start, stop, x1, y1, x2, y2 in sorted(spans):
        phrase = str(body["caption"])[int(start) : int(stop)]
        found.append(Region(phrase, (x1 * width, y1 * height, x2 * width, y2 * height)))
    return found


def _parts(content: Any) -> list[Region]:
    """Text parts followed by box parts of the first image; a phrase is the last line of the text."""
    found: list[Region] = []
    phrase = ""
    for part in content if isinstance(content, list) else ():
        if isinstance(part, str) or part.get("type") == "text":
            text = part if isinstance(part, str) else part["text"]
            phrase = text.strip().rsplit("\n", 1)[-1] or phrase
        elif part.get("type") == "box" and not part.get("image", 0):
            found.append(Region(phrase, _box(part["xyxy"])))
    return found
