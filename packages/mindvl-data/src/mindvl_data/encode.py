# SPDX-License-Identifier: Apache-2.0
"""RawSample -> Encoding (token ids and media grids, nothing decoded) -> TokenizedSample (with pixels).

Comes after reading, before collate. Measuring and loading both use `encode_sample`, so that a sample has exactly the
measured length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mindvl_data.config import ImageConfig, SampleRules, VideoConfig
from mindvl_data.decoding import opened
from mindvl_data.errors import SampleError
from mindvl_data.images import smart_resize, to_patches
from mindvl_data.patches import PatchBuffer
from mindvl_data.samples import cut_turns, num_turns, parse_sample
from mindvl_data.tokenization import Tokenizer, expand
from mindvl_data.types import IGNORE_INDEX, MediaSize, RawSample, Sample, TokenizedSample
from mindvl_data.video import decode_video, video_layout

Grid = tuple[int, int, int]  # patches along time, height, width
Scale = tuple[tuple[int, int], tuple[int, int]]  # (height, width) of an original, and of the same image resized
_THOUSAND = (1000, 1000)  # size of every image in relative coordinates


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """A sample without its pixels."""

    sample: Sample  # the used part of the record, without removed turns
    ids: NDArray[np.int64]  # [S], one placeholder per image or video, or per temporal patch of a video with timestamps
    in_loss: NDArray[np.bool_]  # [S], tokens with loss
    grids: tuple[Grid, ...]  # of the used media, in order; they are the first media of the sample
    image: ImageConfig  # with the image limits of this sample
    video: VideoConfig
    num_tokens: int  # placeholders repeated
    num_patches: int


def encode_sample(raw: RawSample, *, rules: SampleRules, tokenizer: Tokenizer) -> Encoding:
    """Compute tokens and grids of one sample.

    Whole turns are removed from the end of a conversation longer than `rules.max_tokens` until it fits or one turn is
    left. Samples with one turn or none are not changed.

    Raises:
        SampleError: The record or a media size is invalid, or the template raises an error.
    """
    sample = parse_sample(raw)
    image = sample_image(rules.image, sample)
    grids = tuple(_media_grid(size, image, rules.video) for size in raw.sizes)
    whole = _encode(sample, grids, raw.sizes, image, rules.video, tokenizer)
    if rules.max_tokens is None or whole.num_tokens <= rules.max_tokens:
        return whole

    best = whole
    fewest, most = 0, num_turns(sample)  # `fewest` turns fit, `most` turns do not
    while most - fewest > 1:  # bisection, so that a long conversation is not encoded once per turn
        middle = (fewest + most) // 2
        try:
            kept = cut_turns(sample, middle)
            tried = _encode(kept, grids, raw.sizes, image, rules.video, tokenizer)
        except SampleError:  # so few turns are not a valid sample; more may be
            fewest = middle
            continue
        if tried.num_tokens <= rules.max_tokens:
            fewest, best = middle, tried
        else:
            most = middle
    return best


def image_patches(raw: RawSample, encoding: Encoding) -> int:
    """Number of patches of the used images, without videos."""
    pairs = zip(raw.sizes, encoding.grids, strict=False)
    return sum(time * height * width for size, (time, height, width) in pairs if not size.frames)


def decode_sample(
    raw: RawSample,
    encoding: Encoding,
    *,
    tokenizer: Tokenizer,
    buffer: PatchBuffer | None = None,
    with_pixels: bool = True,
) -> TokenizedSample:
    """Decode and resize the used media, cut them into patches, and repeat the placeholders.

    Args:
        buffer: Buffer to which patches of images are appended; None: a new buffer.
        with_pixels: False omits patches and keeps their grids; nothing is decoded, so no sample can fail.

    Raises:
        SampleError: An image or video cannot be decoded, or differs from the index. Patches that the sample already
            added to the buffer are removed.
    """
    buffer = buffer or PatchBuffer(image_patches(raw, encoding) if with_pixels else 0, encoding.image.patch_dim)
    start = buffer.used
    try:
        return _decode_sample(raw, encoding, tokenizer, buffer, with_pixels)
    except SampleError:
        buffer.used = start
        raise


def _decode_sample(
    raw: RawSample, encoding: Encoding, tokenizer: Tokenizer, buffer: PatchBuffer, with_pixels: bool
) -> TokenizedSample:
    image, start = encoding.image, buffer.used
    videos: list[NDArray[np.uint8]] = []
    grids: tuple[list[Grid], list[Grid]] = [], []
    seconds: list[float] = []
    for content, size, grid in zip(raw.media, raw.sizes, encoding.grids, strict=False):
        if size.frames:
            layout = video_layout(size, encoding.video, image)
            if with_pixels:
                videos.append(decode_video(content, size, layout, image))
            seconds.append(layout.seconds_per_grid)
            grids[1].append(grid)
            continue
        grids[0].append(grid)
        if not with_pixels:
            continue
        target = (grid[1] * image.patch_size, grid[2] * image.patch_size) if image.jpeg_scaling else None
        with opened(
            content, decode_limit=image.decode_limit, padded=True, scratch=buffer.scratch, at_least=target
        ) as decoded:
            if decoded.original != (size.height, size.width):
                height, width = decoded.original
                raise SampleError(f"image has {height}x{width} pixels, but {size.height}x{size.width} were indexed")
            _, found = to_patches(decoded, image, buffer)
        assert found == grid
    merged = tokens_per_placeholder(encoding.grids, raw.sizes, image, encoding.video)
    input_ids, labels = expand(encoding, merged, tokenizer.media_pad_ids)
    return TokenizedSample(
        input_ids=input_ids,
        labels=labels,
        pixel_values=buffer.since(start),
        image_grid_thw=np.array(grids[0], np.int64).reshape(-1, 3),
        pixel_values_videos=_end_to_end(videos, 2 * image.patch_dim),
        video_grid_thw=np.array(grids[1], np.int64).reshape(-1, 3),
        seconds_per_grid=np.array(seconds, np.float64),
    )


def placeholder(length: int, *, patch_dim: int, pad_id: int) -> TokenizedSample:
    """A placeholder of `length` tokens without loss tokens, for a sample that failed to decode."""
    return TokenizedSample(
        input_ids=np.full(length, pad_id, np.int64),
        labels=np.full(length, IGNORE_INDEX, np.int64),
        pixel_values=_end_to_end([], patch_dim),
        image_grid_thw=np.zeros((0, 3), np.int64),
        pixel_values_videos=_end_to_end([], 2 * patch_dim),
        video_grid_thw=np.zeros((0, 3), np.int64),
        seconds_per_grid=np.zeros(0, np.float64),
    )


def sample_image(image: ImageConfig, sample: Sample) -> ImageConfig:
    """The image limits of one sample: those of its record override those of source and mixture.

    If the record has only one limit and it conflicts with the other limit, the other limit is adjusted.
    """
    low, high = sample.min_pixels, sample.max_pixels
    if low is None and high is None:
        return image
    block = image.multiple**2
    new_low = low if low is not None else min(image.min_pixels, high or 0)
    new_high = high if high is not None else max(image.max_pixels, low or 0)
    return replace(image, min_pixels=max(new_low, block), max_pixels=max(new_high, block))


def image_scales(sizes: Sequence[MediaSize], image: ImageConfig) -> list[Scale]:
    """(original, resized) size of each image, without videos."""
    return [((size.height, size.width), _resized(size, image)) for size in sizes if not size.frames]


def text_scales(scales: Sequence[Scale], image: ImageConfig) -> list[Scale]:
    """(original size, size in the unit of coordinates in texts) of each image."""
    return list(scales) if image.coordinates == "absolute" else [(original, _THOUSAND) for original, _ in scales]


def _encode(
    sample: Sample,
    grids: tuple[Grid, ...],
    sizes: tuple[MediaSize, ...],
    image: ImageConfig,
    video: VideoConfig,
    tokenizer: Tokenizer,
) -> Encoding:
    used = grids[: sample.num_images + sample.num_videos]
    encoded = tokenizer.encode(sample, text_scales(image_scales(sizes, image), image))
    if video.timestamps and sample.num_videos:
        videos = [size for size, _ in zip(sizes, used, strict=False) if size.frames]
        encoded = tokenizer.with_timestamps(encoded, [video_layout(size, video, image).times for size in videos])
    merged = tokens_per_placeholder(used, sizes, image, video)
    return Encoding(
        sample=sample,
        ids=encoded.ids,
        in_loss=encoded.in_loss,
        grids=used,
        image=image,
        video=video,
        num_tokens=len(encoded.ids) - len(merged) + sum(merged),
        num_patches=sum(t * h * w for t, h, w in used),
    )


def _media_grid(size: MediaSize, image: ImageConfig, video: VideoConfig) -> Grid:
    if size.frames:
        return video_layout(size, video, image).grid
    height, width = _resized(size, image)
    return 1, height // image.patch_size, width // image.patch_size


def tokens_per_placeholder(
    grids: Sequence[Grid], sizes: Sequence[MediaSize], image: ImageConfig, video: VideoConfig
) -> list[int]:
    """Visual tokens of each placeholder of an Encoding, in order."""
    counts: list[int] = []
    for (time, height, width), size in zip(grids, sizes, strict=False):
        of_step = height * width // image.spatial_merge_size**2
        counts += [of_step] * time if size.frames and video.timestamps else [time * of_step]
    return counts


def _resized(size: MediaSize, image: ImageConfig) -> tuple[int, int]:
    return smart_resize(
        size.height, size.width, multiple=image.multiple, min_pixels=image.min_pixels, max_pixels=image.max_pixels
    )


def _end_to_end(patches: list[NDArray[np.uint8]], patch_dim: int) -> NDArray[np.uint8]:
    if len(patches) == 1:
        return patches[0]
    return np.concatenate(patches) if patches else np.zeros((0, patch_dim), np.uint8)
