# SPDX-License-Identifier: Apache-2.0
"""Encoded video -> uint8 patches: which frames, how large, decoded and cut two frames at a time.

Comes after shards, before collate; stands beside images.py. Number and places of frames are those of transformers'
Qwen2-VL video processor (`sample_frames`), the pixel budget of a frame is that of qwen-vl-utils (`fetch_video`; in
transformers `cap_pixels_per_frame`); Qwen2.5-VL, arXiv 2502.13923. The grid follows from what the index holds, so
nothing is decoded to plan it. PyAV is imported when the first video is met.
"""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.config import ImageConfig, VideoConfig
from mindvl_data.errors import DataError, SampleError
from mindvl_data.images import cut_patches, resize, smart_resize
from mindvl_data.types import MediaSize

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

TEMPORAL_PATCH = 2  # frames in one patch
MAX_FRAME_PIXELS = 80_000_000  # a video whose frames claim more is not decoded
MAX_DECODED_PIXELS = 200_000_000_000  # pixels times frames; about an hour at 1920x1080 and 30 frames per second


@dataclass(frozen=True, kw_only=True)
class VideoLayout:
    """What a video becomes, from its size alone."""

    frames: NDArray[np.int64]  # places of the frames that are used, ascending
    height: int  # of a frame after the resize, in pixels
    width: int
    grid: tuple[int, int, int]  # patches along time, height, width
    seconds_per_grid: float  # time between two steps of the grid


def probe(content: bytes) -> MediaSize:
    """Height and width as shown (rotation applied), frames and frames per second; one frame is decoded.

    Raises:
        SampleError: Not an mp4 with a video, or one that is damaged, empty or larger than the limits.
        DataError: PyAV is not installed.
    """
    with _opened(content) as (container, stream):
        packets = container.demux(stream)
        frames = sum(packet.size > 0 and not packet.is_discard for packet in packets)
        codec = stream.codec_context
        _check_limits(codec.height, codec.width, frames)
        fps = float(stream.average_rate or 0)
        if not frames or not 0 < fps < math.inf:
            raise SampleError(f"video has {frames} frames at {fps} per second")
        container.seek(0)
        first = next(container.decode(stream), None)
        if first is None:
            raise SampleError("video has no frame that can be decoded")
        height, width = (first.width, first.height) if first.rotation % 180 else (first.height, first.width)
    # the index keeps fps as float32; everything is computed from that value
    return MediaSize(height=height, width=width, frames=frames, fps=float(np.float32(fps)))


def frame_counts(frames: NDArray[Any], fps: NDArray[Any], config: VideoConfig) -> NDArray[np.int64]:
    """How many frames are used of each video; even, but for a video of a single frame.

    Args:
        frames, fps: [num_videos], what the videos have.
    """
    total = frames.astype(np.float64)
    most = np.minimum(config.max_frames, total) // TEMPORAL_PATCH * TEMPORAL_PATCH
    wanted = np.maximum(total / fps.astype(np.float64) * config.fps, config.min_frames)
    used = np.minimum(np.minimum(wanted, most), total) // TEMPORAL_PATCH * TEMPORAL_PATCH
    return np.maximum(used, 1).astype(np.int64)


def frame_pixels(used: NDArray[np.int64], config: VideoConfig) -> NDArray[np.int64]:
    """The most pixels a frame may have when so many frames are used: an even share of the video's budget."""
    share = config.total_pixels * TEMPORAL_PATCH // used
    return np.maximum(np.minimum(config.max_pixels, share), int(config.min_pixels * 1.05))


def video_layout(size: MediaSize, config: VideoConfig, image: ImageConfig) -> VideoLayout:
    """Frames, frame size and grid of one video.

    Args:
        image: Gives the size of a patch and of a merge block; its pixel limits are those of images.

    Raises:
        SampleError: One side is more than 200 times the other, or the index knows no frames.
    """
    if size.frames < 1 or not 0 < size.fps < math.inf:
        raise SampleError(f"video has {size.frames} frames at {size.fps} per second")
    used = int(frame_counts(np.array([size.frames]), np.array([size.fps]), config)[0])
    height, width = smart_resize(
        size.height,
        size.width,
        multiple=image.multiple,
        min_pixels=config.min_pixels,
        max_pixels=int(frame_pixels(np.array([used]), config)[0]),
    )
    steps = -(-used // TEMPORAL_PATCH)
    return VideoLayout(
        frames=(np.arange(used) * (size.frames / used)).astype(np.float32).astype(np.int64),  # rounded as torch does
        height=height,
        width=width,
        grid=(steps, height // image.patch_size, width // image.patch_size),
        seconds_per_grid=TEMPORAL_PATCH * size.frames / (used * size.fps),
    )


def decode_video(content: bytes, size: MediaSize, layout: VideoLayout, image: ImageConfig) -> NDArray[np.uint8]:
    """Decode the frames of the layout, resize and cut them.

    Returns:
        Patches [P, 2 * patch_dim], values of a patch ordered (channel, time, row, column); of an odd number of frames
        the last one is repeated.

    Raises:
        SampleError: The video is damaged, or is not what the index says.
        DataError: PyAV is not installed.
    """
    steps, rows, columns = layout.grid
    patches = np.empty((steps, rows * columns, TEMPORAL_PATCH * image.patch_dim), np.uint8)
    pair = np.empty((TEMPORAL_PATCH, layout.height, layout.width, 3), np.uint8)
    number = -1
    for number, pixels in enumerate(used_frames(content, size, layout)):
        pair[number % TEMPORAL_PATCH :] = resize(
            pixels, layout.height, layout.width
        )  # also stands for a missing second
        if number % TEMPORAL_PATCH or number == len(layout.frames) - 1:
            patches[number // TEMPORAL_PATCH] = cut_patches(pair, image)
    assert number == len(layout.frames) - 1
    return patches.reshape(steps * rows * columns, -1)


def used_frames(content: bytes, size: MediaSize, layout: VideoLayout) -> Iterator[NDArray[np.uint8]]:
    """The frames of the layout as they are shown, [H, W, 3] each, one at a time.

    A frame stands for the moment at which it would be shown at an even rate: where the rate varies, the frame shown at
    that moment is taken.
    """
    moments = (layout.frames / size.fps).tolist()
    half = 0.5 / size.fps  # a frame's time is rounded to ticks of the file
    with _opened(content) as (container, stream):
        _check_limits(stream.codec_context.height, stream.codec_context.width, size.frames)
        given, decoded, start, shown = 0, 0, 0.0, None
        for frame in container.decode(stream):
            time = decoded / size.fps if frame.time is None else float(frame.time)
            start = time if shown is None else start
            while shown is not None and given < len(moments) and moments[given] + half < time - start:
                yield _upright(shown, size)
                given += 1
            if given == len(moments):
                return
            shown, decoded = frame, decoded + 1
        if shown is None or decoded < size.frames:
            raise SampleError(f"video ends after {decoded} of {size.frames} frames")
        for _ in moments[given:]:
            yield _upright(shown, size)


def _upright(frame: Any, size: MediaSize) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
    if frame.rotation:
        pixels = np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
    if pixels.shape[:2] != (size.height, size.width):
        raise SampleError(
            f"video has frames of {pixels.shape[0]}x{pixels.shape[1]} pixels instead of {size.height}x{size.width}"
        )
    return pixels


def _check_limits(height: int, width: int, frames: int) -> None:
    if height * width > MAX_FRAME_PIXELS or height * width * frames > MAX_DECODED_PIXELS:
        raise SampleError(
            f"video of {frames} frames of {height}x{width} pixels is larger than the decode limits of "
            f"{MAX_FRAME_PIXELS} pixels a frame and {MAX_DECODED_PIXELS} in all"
        )


@contextmanager
def _opened(content: bytes) -> "Iterator[tuple[InputContainer, VideoStream]]":
    """The file and its first video; whatever goes wrong inside the block means a damaged video."""
    try:
        import av
    except ImportError as error:
        raise DataError(
            "videos need PyAV, which is not installed. mindvl_data.video. Install the package `av`."
        ) from error
    try:
        # only this format: others, such as playlists, could make the library read further files
        with av.open(io.BytesIO(content), mode="r", format="mp4") as container:
            if not container.streams.video:
                raise SampleError("file holds no video")
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1  # the loader has its own threads
            yield container, stream
    except (DataError, AssertionError):
        raise
    except Exception as error:  # a foreign decoder; each of its many errors means a damaged file
        raise SampleError(f"video cannot be decoded: {error}") from error
