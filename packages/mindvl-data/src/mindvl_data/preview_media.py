# SPDX-License-Identifier: Apache-2.0
"""Turns and media of a previewed sample as the model receives them, as plain data; another package renders them.

Comes after preview.py. Images and frames are resized, and coordinates are those that the text of the sample contains.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mindvl_data.chat import coordinates_text, move_coordinates
from mindvl_data.config import ImageConfig
from mindvl_data.encode import Scale, text_scales
from mindvl_data.errors import SampleError
from mindvl_data.images import decode, resize
from mindvl_data.preview import Preview, TokenRun, token_runs
from mindvl_data.tokenization import Tokenizer
from mindvl_data.types import Batch, Coordinates, MediaSize, Part, Text, Video
from mindvl_data.video import used_frames, video_layout

MOST_FRAMES = 64  # kept of one video, at equal distances
FRAME_HEIGHT = 110  # pixels of a kept frame


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One message: its parts as (kind, text)."""

    role: str  # empty for text without a template
    is_cut: bool  # left out because the sample is too long
    parts: tuple[tuple[Literal["text", "box", "medium"], str], ...]


@dataclass(frozen=True, kw_only=True)
class Medium:
    """One image or video after its resize; `error` alone when it does not decode."""

    number: int
    size: MediaSize  # as in the shard
    error: str = ""
    height: int = 0  # after the resize
    width: int = 0
    grid: tuple[int, int, int] = (0, 0, 0)  # visual tokens along time, height and width
    num_frames: int = 0  # that the model receives
    frames: tuple[
        tuple[float, NDArray[np.uint8]], ...
    ] = ()  # (second, pixels [H, W, 3]); of a video small, and not all
    marks: tuple[tuple[int, ...], ...] = ()  # points (x, y) and boxes (left, top, right, bottom) of the sample's text


@dataclass(frozen=True, kw_only=True)
class PackedSample:
    """The place of one sample in a packed sequence, and its tokens."""

    source: str
    key: str
    start: int
    stop: int
    tokens: tuple[TokenRun, ...]


def turns(preview: Preview) -> list[Turn]:
    """The messages of the sample, those that are cut included."""
    sample, scales = preview.sample, text_scales(preview.scales, preview.image)
    if not sample.messages:
        return [Turn(role="", is_cut=False, parts=_parts(sample.content, scales))]
    kept = len(sample.messages) - preview.num_cut
    return [
        Turn(role=message.role, is_cut=number >= kept, parts=_parts(message.parts, scales))
        for number, message in enumerate(sample.messages)
    ]


def media(preview: Preview) -> list[Medium]:
    """The media that the model receives, in order; a medium of a turn that is cut is left out."""
    found, image_number = [], 0
    used = len(preview.encoding.grids) if preview.encoding else len(preview.raw.media)
    for number, (content, size) in enumerate(zip(preview.raw.media[:used], preview.raw.sizes, strict=False)):
        try:
            medium = _video(content, size, number, preview) if size.frames else _image(
                content, size, number, image_number, preview
            )  # fmt: skip
        except SampleError as error:
            medium = Medium(number=number, size=size, error=str(error))
        found.append(medium)
        image_number += not size.frames
    return found


def packed_samples(batch: Batch, tokenizer: Tokenizer) -> list[PackedSample]:
    """The samples of one packed sequence with their tokens."""
    ends = batch.cu_seqlens.tolist()
    return [
        PackedSample(
            source=sample.source,
            key=sample.key,
            start=start,
            stop=stop,
            tokens=tuple(token_runs(batch.input_ids[start:stop].numpy(), batch.labels[start:stop].numpy(), tokenizer)),
        )
        for sample, start, stop in zip(batch.samples, ends, ends[1:], strict=False)
    ]


def _parts(parts: Iterable[Part], scales: Sequence[Scale]) -> tuple[tuple[Literal["text", "box", "medium"], str], ...]:
    pieces: list[tuple[Literal["text", "box", "medium"], str]] = []
    for part in parts:
        if isinstance(part, Text):
            pieces.append(("text", part.text))
        elif isinstance(part, Coordinates):
            pieces.append(("box", f"{coordinates_text(part, scales[part.image])} of image {part.image}"))
        else:
            pieces.append(("medium", f"{'video' if isinstance(part, Video) else 'image'} {part.index}"))
    return tuple(pieces)


def _image(content: bytes, size: MediaSize, number: int, image_number: int, preview: Preview) -> Medium:
    scale, step = preview.scales[image_number], preview.image.multiple
    _, (height, width) = scale
    sample = preview.sample
    parts = [*sample.content, *(part for message in sample.messages for part in message.parts)]
    marked = [part for part in parts if isinstance(part, Coordinates) and part.image == image_number]
    return Medium(
        number=number,
        size=size,
        height=height,
        width=width,
        grid=(1, height // step, width // step),
        num_frames=1,
        frames=((0.0, resize(_decoded(content, preview.image, (height, width)), height, width)),),
        marks=tuple(_mark(part, scale) for part in marked),
    )


def _decoded(content: bytes, image: ImageConfig, size: tuple[int, int]) -> NDArray[np.uint8]:
    return decode(content, decode_limit=image.decode_limit, at_least=size if image.jpeg_scaling else None)


def _video(content: bytes, size: MediaSize, number: int, preview: Preview) -> Medium:
    layout = video_layout(size, preview.rules.video, preview.image)
    every = -(-len(layout.frames) // MOST_FRAMES)
    height = min(size.height, FRAME_HEIGHT)
    width = max(1, size.width * height // size.height)
    merge = preview.image.spatial_merge_size
    steps, rows, columns = layout.grid
    return Medium(
        number=number,
        size=size,
        height=layout.height,
        width=layout.width,
        grid=(steps, rows // merge, columns // merge),
        num_frames=len(layout.frames),
        frames=tuple(
            (layout.frames[place] / size.fps, resize(pixels, height, width))
            for place, pixels in enumerate(used_frames(content, size, layout))
            if place % every == 0
        ),
    )


def _mark(part: Coordinates, scale: Scale) -> tuple[int, ...]:
    values = move_coordinates(part, scale)
    if len(values) == 2:
        return tuple(values)
    (left, right), (top, bottom) = sorted(values[::2]), sorted(values[1::2])
    return left, top, right, bottom
