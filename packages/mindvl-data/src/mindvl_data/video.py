# SPDX-License-Identifier: Apache-2.0
"""Encoded video -> uint8 patches: select and resize frames, decode and split them two at a time.

Comes after shards, before collate; the counterpart of images.py. With frames "stride" the number and positions of frames
are those of the Qwen2-VL video processor of transformers (`sample_frames`), and with budget "per_frame" the pixel limits of
a frame are those of qwen-vl-utils (`fetch_video`; in transformers `cap_pixels_per_frame`); Qwen2.5-VL, arXiv 2502.13923.
"endpoints" and "whole" are the rules of the Qwen3-VL video processor of transformers. The grid is computed from the index
alone, without decoding. PyAV is imported with the first video.
"""

import io
import math
import re
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
# File extension -> demuxer of libav. A demuxer is always named: playlists could make the library read other files.
CONTAINERS = {"mp4": "mp4", "mov": "mp4", "mkv": "matroska", "webm": "matroska", "avi": "avi"}
MAX_FRAME_PIXELS = 80_000_000  # a video with larger frames is not decoded
MAX_DECODED_PIXELS = 200_000_000_000  # pixels times frames; about an hour at 1920x1080 and 30 frames per second


_QUICKTIME_ATOMS = (b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_EBML = b"\x1a\x45\xdf\xa3"
_WEBM = re.compile(rb"\x42\x82.webm", re.DOTALL)  # the element DocType


@dataclass(frozen=True, kw_only=True)
class VideoLayout:
    """The frames and the grid of a video, computed from its size."""

    frames: NDArray[np.int64]  # positions of the selected frames, ascending
    height: int  # of a frame after the resize, in pixels
    width: int
    grid: tuple[int, int, int]  # patches along time, height, width
    seconds_per_grid: float  # seconds between two steps of the grid
    times: tuple[float, ...] = ()  # mean time of the frames of each step in seconds; empty without timestamps


def video_extension(content: bytes) -> str | None:
    """The extension for the container of the bytes; None if it is not one of CONTAINERS."""
    if content[4:8] == b"ftyp":
        return "mov" if content[8:12] == b"qt  " else "mp4"
    if content[4:8] in _QUICKTIME_ATOMS:  # a QuickTime file of the time before brands
        return "mov"
    if content.startswith(_EBML):
        return "webm" if _WEBM.search(content, 0, 64) else "mkv"
    return "avi" if content[:4] == b"RIFF" and content[8:12] == b"AVI " else None


def probe(content: bytes) -> MediaSize:
    """Read the displayed size (rotation applied), number of frames and frames per second; decodes one frame.

    Raises:
        SampleError: The file is none of CONTAINERS with a video, or is damaged, empty or larger than the limits.
        DataError: PyAV is not installed.
    """
    with _opened(content) as (container, stream):
        packets = container.demux(stream)
        frames = sum(packet.size > 0 and not packet.is_discard for packet in packets)
        codec = stream.codec_context
        _check_limits(codec.height, codec.width, frames)
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        if not frames or not 0 < fps < math.inf:
            raise SampleError(f"video has {frames} frames at {fps} per second")
        container.seek(0)
        first = next(container.decode(stream), None)
        if first is None:
            raise SampleError("video has no frame that can be decoded")
        height, width = (first.width, first.height) if first.rotation % 180 else (first.height, first.width)
    # The index stores fps as float32, and everything is computed from that value.
    return MediaSize(height=height, width=width, frames=frames, fps=float(np.float32(fps)))


def frame_counts(frames: NDArray[Any], fps: NDArray[Any], config: VideoConfig) -> NDArray[np.int64]:
    """The number of selected frames of each video; with frames "stride" even, except for a video with a single frame.

    Args:
        frames, fps: [num_videos], number of frames and frames per second of the videos.
        config: Sampling rate and limits.
    """
    total = frames.astype(np.float64)
    if config.frames == "endpoints":
        counts = np.trunc(total / fps.astype(np.float64) * config.fps)
        return np.minimum(np.clip(counts, config.min_frames, config.max_frames), total).astype(np.int64)
    most = np.minimum(config.max_frames, total) // TEMPORAL_PATCH * TEMPORAL_PATCH
    wanted = np.maximum(total / fps.astype(np.float64) * config.fps, config.min_frames)
    used = np.minimum(np.minimum(wanted, most), total) // TEMPORAL_PATCH * TEMPORAL_PATCH
    return np.maximum(used, 1).astype(np.int64)


def frame_pixels(used: NDArray[np.int64], config: VideoConfig) -> NDArray[np.int64]:
    """The upper pixel limit of a frame with budget "per_frame": an equal share of the budget of the video for each frame."""
    share = config.total_pixels * TEMPORAL_PATCH // used
    return np.maximum(np.minimum(config.max_pixels, share), int(config.min_pixels * 1.05))


def frame_size(size: tuple[int, int], used: int, config: VideoConfig, image: ImageConfig) -> tuple[int, int]:
    """Height and width of a resized frame, for videos of `used` frames of the given height and width.

    Raises:
        SampleError: The aspect ratio is over 200.
    """
    height, width = size
    if config.budget == "per_frame":
        most = int(frame_pixels(np.array([used]), config)[0])
        return smart_resize(height, width, multiple=image.multiple, min_pixels=config.min_pixels, max_pixels=most)
    multiple = image.multiple
    if min(height, width) < multiple:  # transformers enlarges such frames to one visual token first
        scale = max(multiple / height, multiple / width)
        height, width = int(height * scale), int(width * scale)
    # The pixels of all frames; transformers rounds their number to whole patches for the comparison only.
    frames, rounded = max(used, TEMPORAL_PATCH), round(max(used, TEMPORAL_PATCH) / TEMPORAL_PATCH) * TEMPORAL_PATCH
    return smart_resize(
        height,
        width,
        multiple=multiple,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
        num_frames=frames,
        compared_frames=rounded,
    )


def video_layout(size: MediaSize, config: VideoConfig, image: ImageConfig) -> VideoLayout:
    """Select the frames of a video and compute their size and the grid.

    Args:
        size: Size of the video as in the index.
        config: Sampling rate, limits and pixel budget.
        image: Provides the patch size and merge size; its pixel limits are not used.

    Raises:
        SampleError: The aspect ratio is over 200, or the video has no frames.
    """
    if size.frames < 1 or not 0 < size.fps < math.inf:
        raise SampleError(f"video has {size.frames} frames at {size.fps} per second")
    used = int(frame_counts(np.array([size.frames]), np.array([size.fps]), config)[0])
    height, width = frame_size((size.height, size.width), used, config, image)
    steps = -(-used // TEMPORAL_PATCH)
    if config.frames == "endpoints":
        frames = np.linspace(0, size.frames - 1, used).round().astype(np.int64)
    else:
        frames = (np.arange(used) * (size.frames / used)).astype(np.float32).astype(np.int64)  # the rounding of torch
    return VideoLayout(
        frames=frames,
        height=height,
        width=width,
        grid=(steps, height // image.patch_size, width // image.patch_size),
        seconds_per_grid=TEMPORAL_PATCH * size.frames / (used * size.fps),
        times=_times(frames, size.fps) if config.timestamps else (),
    )


def _times(frames: NDArray[np.int64], fps: float) -> tuple[float, ...]:
    """Mean time of the first and last frame of each temporal patch; the last frame is repeated if their number is odd."""
    seconds = [int(frame) / fps for frame in frames]
    seconds += seconds[-1:] * (-len(seconds) % TEMPORAL_PATCH)
    return tuple(
        (seconds[start] + seconds[start + TEMPORAL_PATCH - 1]) / 2 for start in range(0, len(seconds), TEMPORAL_PATCH)
    )


def decode_video(content: bytes, size: MediaSize, layout: VideoLayout, image: ImageConfig) -> NDArray[np.uint8]:
    """Decode the selected frames, resize them and split them into patches.

    Returns:
        Patches [P, 2 * patch_dim], values of a patch ordered (channel, time, row, column). If the number of frames is
        odd, the last one is repeated.

    Raises:
        SampleError: The video is damaged, or differs from the index.
        DataError: PyAV is not installed.
    """
    steps, rows, columns = layout.grid
    patches = np.empty((steps, rows * columns, TEMPORAL_PATCH * image.patch_dim), np.uint8)
    pair = np.empty((TEMPORAL_PATCH, layout.height, layout.width, 3), np.uint8)
    number = -1
    for number, pixels in enumerate(used_frames(content, size, layout)):
        # A first frame also fills the second slot, in case there is no second frame.
        pair[number % TEMPORAL_PATCH :] = resize(pixels, layout.height, layout.width)
        if number % TEMPORAL_PATCH or number == len(layout.frames) - 1:
            patches[number // TEMPORAL_PATCH] = cut_patches(pair, image)
    assert number == len(layout.frames) - 1
    return patches.reshape(steps * rows * columns, -1)


def used_frames(content: bytes, size: MediaSize, layout: VideoLayout) -> Iterator[NDArray[np.uint8]]:
    """Yield the selected frames as displayed, [H, W, 3] each.

    A position stands for a time at the average frame rate: if the rate varies, the frame displayed at that time is
    used.
    """
    times = (layout.frames / size.fps).tolist()
    half = 0.5 / size.fps  # frame times are rounded to the time base of the file
    with _opened(content) as (container, stream):
        _check_limits(stream.codec_context.height, stream.codec_context.width, size.frames)
        given, decoded, start, shown = 0, 0, 0.0, None
        for frame in container.decode(stream):
            time = decoded / size.fps if frame.time is None else float(frame.time)
            start = time if shown is None else start
            while shown is not None and given < len(times) and times[given] + half < time - start:
                yield _upright(shown, size)
                given += 1
            if given == len(times):
                return
            shown, decoded = frame, decoded + 1
        if shown is None or decoded < size.frames:
            raise SampleError(f"video ends after {decoded} of {size.frames} frames")
        for _ in times[given:]:
            yield _upright(shown, size)


def _upright(frame: Any, size: MediaSize) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
    if frame.rotation:
        pixels = np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
    if pixels.shape[:2] != (size.height, size.width):
        raise SampleError(
            f"expected video frames of {size.height}x{size.width} pixels, got {pixels.shape[0]}x{pixels.shape[1]}"
        )
    return pixels


def _check_limits(height: int, width: int, frames: int) -> None:
    if height * width > MAX_FRAME_PIXELS or height * width * frames > MAX_DECODED_PIXELS:
        raise SampleError(
            f"video of {frames} frames of {height}x{width} pixels is larger than the decode limits of "
            f"{MAX_FRAME_PIXELS} pixels per frame and {MAX_DECODED_PIXELS} in total"
        )


@contextmanager
def _opened(content: bytes) -> "Iterator[tuple[InputContainer, VideoStream]]":
    """Open a file and its first video stream; an error inside the block is reported as a damaged video."""
    try:
        import av
    except ImportError as error:
        raise DataError(
            "mindvl_data.video: PyAV is not installed, which decodes videos. Install the package `av`."
        ) from error
    demuxer = CONTAINERS[video_extension(content) or "mp4"]  # bytes of no known container fail as an mp4
    try:
        with av.open(io.BytesIO(content), mode="r", format=demuxer) as container:
            if not container.streams.video:
                raise SampleError("file has no video stream")
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1  # the loader has its own threads
            yield container, stream
    except (DataError, AssertionError):
        raise
    except Exception as error:  # the decoder raises errors of many types, all for damaged files
        raise SampleError(f"video cannot be decoded: {error}") from error
