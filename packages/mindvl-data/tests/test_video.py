# SPDX-License-Identifier: Apache-2.0
"""Video: frames, grid and patches as transformers' Qwen2-VL video processor has them; unusual and damaged files."""

import io
import sys
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.video_utils import VideoMetadata

from mindvl_data import DataError, ImageConfig, SampleError, VideoConfig
from mindvl_data import video as video_module
from mindvl_data.types import MediaSize
from mindvl_data.video import VideoLayout, decode_video, probe, used_frames, video_extension, video_layout

IMAGE = ImageConfig()
SMALL = VideoConfig(min_pixels=784, max_pixels=64 * 784, total_pixels=2000 * 784)


def make_video(
    num_frames: int,
    *,
    height: int = 48,
    width: int = 64,
    fps: int = 10,
    codec: str = "libx264",
    rotation: int = 0,
    times: list[int] | None = None,
    audio: bool = False,
    container: str = "mp4",
) -> bytes:
    """Frame k is of grey level 10 * k, but for a white corner; `times` are in hundredths of a second."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as muxer:
        stream: Any = muxer.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 100)
        if audio:
            sound: Any = muxer.add_stream("aac", rate=8000)
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
            silence.sample_rate = 8000
            muxer.mux(sound.encode(silence) + sound.encode(None))
        for number in range(num_frames):
            pixels = np.full((height, width, 3), 10 * number % 256, np.uint8)
            pixels[: height // 3, : width // 3] = 255
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 100)
            muxer.mux(stream.encode(frame))
        muxer.mux(stream.encode(None))
    return file.getvalue()


def sound_only() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=8000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        silence.sample_rate = 8000
        container.mux(stream.encode(silence) + stream.encode(None))
    return file.getvalue()


def level(pixels: np.ndarray) -> int:
    """The number of the frame, read off its grey."""
    return round(float(pixels[-8:, -8:].mean()) / 10)


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_a_video_is_probed_without_decoding_all_of_it(codec: str) -> None:
    assert probe(make_video(25, codec=codec)) == MediaSize(48, 64, 25, 10.0)
    assert probe(make_video(7, codec=codec, audio=True)) == MediaSize(48, 64, 7, 10.0)


def processor(config: VideoConfig) -> Qwen2VLVideoProcessor:
    return Qwen2VLVideoProcessor(
        size={"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
        max_video_tokens=round(config.total_pixels / 784 / 0.9),
        fps=config.fps,
        min_frames=config.min_frames,
        max_frames=config.max_frames,
        do_sample_frames=True,
        do_rescale=False,
        do_normalize=False,
        cap_pixels_per_frame=True,
    )


@pytest.mark.parametrize(
    ("frames", "fps", "size", "config"),
    [
        (2, 1.0, (30, 40), SMALL),
        (5, 25.0, (64, 64), SMALL),  # shorter than four frames at two a second
        (49, 10.0, (120, 90), SMALL),
        (300, 29.97, (60, 200), SMALL),
        (301, 24.0, (36, 36), VideoConfig(min_pixels=784, max_pixels=9 * 784, max_frames=16)),  # the cap on frames
        (200, 10.0, (200, 200), VideoConfig(min_pixels=784, total_pixels=100 * 784)),  # the cap on all pixels
        (90, 30.0, (240, 320), VideoConfig()),
    ],
)
def test_frames_grid_and_patches_equal_those_of_transformers(
    frames: int, fps: float, size: tuple[int, int], config: VideoConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = np.random.default_rng(frames).integers(0, 256, (frames, *size, 3), dtype=np.uint8)
    theirs = processor(config)(
        torch.from_numpy(video).permute(0, 3, 1, 2),
        video_metadata=[VideoMetadata(total_num_frames=frames, fps=fps)],
        return_metadata=True,
    )
    layout = video_layout(MediaSize(*size, frames, fps), config, IMAGE)
    metadata = theirs["video_metadata"][0]
    assert layout.frames.tolist() == list(metadata.frames_indices)
    assert theirs["video_grid_thw"].tolist() == [list(layout.grid)]
    assert layout.seconds_per_grid == pytest.approx(2 / metadata.sampled_fps)
    monkeypatch.setattr(video_module, "used_frames", lambda *_: iter(video[layout.frames]))
    ours = decode_video(b"", MediaSize(*size, frames, fps), layout, IMAGE)
    difference = np.abs(ours.astype(float) - theirs["pixel_values_videos"].numpy())
    assert difference.mean() <= 1.0
    assert difference.max() <= 3.0


@pytest.mark.parametrize("frames", range(1, 60))
def test_any_number_of_frames_gives_an_even_number_as_transformers_counts(frames: int) -> None:
    config = VideoConfig(max_frames=10)
    layout = video_layout(MediaSize(56, 56, frames, 7.5), config, IMAGE)
    if frames == 1:
        assert layout.frames.tolist() == [0]  # transformers divides by zero
        return
    metadata = VideoMetadata(total_num_frames=frames, fps=7.5)
    assert layout.frames.tolist() == processor(config).sample_frames(metadata, fps=2.0).tolist()


def test_a_coded_video_gives_the_frames_of_its_layout() -> None:
    content = make_video(25)
    size = probe(content)
    layout = video_layout(size, VideoConfig(fps=4.0), IMAGE)
    assert layout.frames.tolist() == [0, 2, 5, 7, 10, 12, 15, 17, 20, 22]
    assert [level(frame) for frame in used_frames(content, size, layout)] == layout.frames.tolist()
    patches = decode_video(content, size, layout, IMAGE)
    assert patches.shape == (5 * layout.grid[1] * layout.grid[2], 2 * 588)
    # value order (channel, time, row, column): the last patch of each step holds the grey of two frames
    last = patches.reshape(5, -1, 3, 2, 196)[:, -1].mean(axis=(1, 3))
    np.testing.assert_array_equal((last / 10).round().ravel(), layout.frames)


def test_of_an_odd_number_of_frames_the_last_is_repeated() -> None:
    content = make_video(1)
    layout = video_layout(probe(content), SMALL, IMAGE)
    patches = decode_video(content, probe(content), layout, IMAGE).reshape(-1, 3, 2, 196)
    assert layout.grid[0] == 1
    np.testing.assert_array_equal(patches[:, :, 0], patches[:, :, 1])


@pytest.mark.parametrize(("rotation", "corner"), [(90, (-1, 0)), (-90, (0, -1)), (180, (-1, -1))])
def test_a_rotated_video_is_shown_upright(rotation: int, corner: tuple[int, int]) -> None:
    """Rotations count against the clock, as FFmpeg counts them: the white corner goes from upper left to `corner`."""
    content = make_video(4, rotation=rotation)
    size = probe(content)
    assert (size.height, size.width) == ((48, 64) if rotation == 180 else (64, 48))
    first = next(used_frames(content, size, video_layout(size, SMALL, IMAGE)))
    assert first[corner].min() > 240
    assert first[0, 0].max() < 15


def test_where_the_rate_varies_the_frame_shown_at_each_moment_is_taken() -> None:
    times = [0, 10, 20, 30, 160, 170, 180, 190]  # eight frames in two seconds, with one long rest
    content = make_video(8, times=times)
    size = probe(content)
    assert size.frames == 8
    layout = video_layout(size, VideoConfig(fps=2.0, min_frames=4), IMAGE)
    taken = [level(frame) for frame in used_frames(content, size, layout)]
    assert len(taken) == 4
    moments = [place / size.fps * 100 for place in layout.frames.tolist()]
    half = 50 / size.fps
    assert taken == [max(k for k, time in enumerate(times) if time <= moment + half) for moment in moments]


@pytest.mark.parametrize(
    ("container", "extension", "codec"),
    [
        ("mov", "mov", "libx264"),
        ("matroska", "mkv", "libx264"),
        ("webm", "webm", "libvpx-vp9"),
        ("avi", "avi", "mpeg4"),
    ],
)
def test_every_container_gives_the_frames_of_the_mp4(container: str, extension: str, codec: str) -> None:
    content = make_video(12, container=container, codec=codec)
    assert video_extension(content) == extension
    size = probe(content)
    assert (size.height, size.width, size.frames, round(size.fps)) == (48, 64, 12, 10)
    layout = VideoLayout(frames=np.arange(12), height=0, width=0, grid=(12, 0, 0), seconds_per_grid=0.0)
    levels = [level(pixels) for pixels in used_frames(content, size, layout)]
    assert levels == list(range(12))


def test_a_quicktime_file_without_a_brand_is_a_video() -> None:
    content = make_video(4, container="mov")
    brand = int.from_bytes(content[:4], "big")
    assert content[4:8] == b"ftyp"
    assert video_extension(content[brand:]) == "mov"


def test_only_a_known_container_with_a_video_is_one() -> None:
    with pytest.raises(SampleError, match="no video"):
        probe(sound_only())
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"
    for content in (b"", b"no video at all", playlist, make_video(5)[:200], bytes(1000)):
        with pytest.raises(SampleError):
            probe(content)


def test_a_video_without_frames_is_refused() -> None:
    with pytest.raises(SampleError):
        probe(make_video(0))
    with pytest.raises(SampleError, match="0 frames"):
        video_layout(MediaSize(48, 64, 0, 10.0), SMALL, IMAGE)


def test_a_damaged_video_is_a_bad_sample_or_has_the_planned_shape() -> None:
    content = make_video(40, codec="mpeg4")
    size = probe(content)
    layout = video_layout(size, SMALL, IMAGE)
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        damaged = np.frombuffer(content, np.uint8).copy()
        damaged[generator.integers(0, len(damaged), 40)] = generator.integers(0, 256, 40)
        try:
            patches = decode_video(damaged.tobytes(), size, layout, IMAGE)
        except SampleError:
            refused += 1
            continue
        assert patches.shape == (np.prod(layout.grid), 2 * 588)
    assert refused > 5


def test_fewer_frames_than_the_index_says_are_a_bad_sample() -> None:
    content = make_video(10)
    longer = MediaSize(48, 64, 30, 10.0)
    with pytest.raises(SampleError, match="10 of 30 frames"):
        decode_video(content, longer, video_layout(longer, SMALL, IMAGE), IMAGE)
    larger = MediaSize(96, 64, 10, 10.0)
    with pytest.raises(SampleError, match="96x64 pixels, got 48x64"):
        decode_video(content, larger, video_layout(larger, SMALL, IMAGE), IMAGE)


def test_a_video_beyond_the_limits_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    content = make_video(30)
    for name, limit in (("MAX_FRAME_PIXELS", 48 * 64 - 1), ("MAX_DECODED_PIXELS", 30 * 48 * 64 - 1)):
        with monkeypatch.context() as patched:
            patched.setattr(video_module, name, limit)
            with pytest.raises(SampleError, match="decode limits"):
                probe(content)
            size = MediaSize(48, 64, 30, 10.0)
            with pytest.raises(SampleError, match="decode limits"):
                decode_video(content, size, video_layout(size, SMALL, IMAGE), IMAGE)


def test_without_pyav_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    content = make_video(2)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DataError, match="Install the package `av`") as caught:
        probe(content)
    assert not isinstance(caught.value, SampleError)


def test_frames_from_the_first_to_the_last_and_their_times_by_hand() -> None:
    config = VideoConfig(
        frames="endpoints", budget="whole", timestamps=True, fps=1.0, min_frames=2, max_frames=9,
        min_pixels=784, max_pixels=100 * 784,
    )  # fmt: skip
    layout = video_layout(MediaSize(56, 56, frames=10, fps=2.0), config, ImageConfig())
    assert layout.frames.tolist() == [0, 2, 4, 7, 9]  # five seconds; 0, 2.25, 4.5, 6.75, 9
    assert layout.times == (0.5, 2.75, 4.5)  # means of 0 and 1, 2 and 3.5, and 4.5 twice
    assert layout.grid == (3, 4, 4)
