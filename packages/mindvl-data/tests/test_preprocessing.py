# SPDX-License-Identifier: Apache-2.0
"""Preprocessing as data: fields that a recipe leaves out are those of the model; Qwen3-VL's equal those of transformers."""

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessor, Qwen3VLConfig, Qwen3VLProcessor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from mindvl_data import DataConfig, ImageConfig, PackingConfig, SampleError, SourceConfig, VideoConfig
from mindvl_data import video as video_module
from mindvl_data.config import SampleRules
from mindvl_data.encode import decode_sample, encode_sample
from mindvl_data.images import decode, to_patches
from mindvl_data.positions import MediaGrids, segment_positions
from mindvl_data.preprocessing import WITHOUT_MODEL, Preprocessing
from mindvl_data.tokenization import Tokenizer
from mindvl_data.types import MediaSize, RawSample
from mindvl_data.video import decode_video, video_layout

QWEN3_VL = Preprocessing(
    patch_size=16,
    frames="endpoints",
    budget="whole",
    timestamps=True,
    min_video_tokens=4,
    max_video_tokens=24_576,
    coordinates="relative",
)
IMAGE = ImageConfig(patch_size=16)
VIDEO = VideoConfig().for_model(QWEN3_VL)


def test_fields_that_are_not_given_are_those_of_the_model() -> None:
    given = DataConfig(
        sources=(SourceConfig(name="a", path="a"),),
        tokenizer="t",  # type: ignore[arg-type]
        packing=PackingConfig(seq_length=64),
        image=ImageConfig(max_pixels=50_176),
        video=VideoConfig(fps=1.0),
    )
    assert (given.image.patch_size, given.image.min_pixels, given.video.max_pixels) == (14, 4 * 784, 768 * 784)
    made = given.for_model(QWEN3_VL)
    assert (made.image.patch_size, made.image.min_pixels, made.image.max_pixels) == (16, 4 * 1024, 50_176)
    assert (given.image.coordinates, made.image.coordinates) == ("absolute", "relative")
    assert (made.video.fps, made.video.frames, made.video.timestamps) == (1.0, "endpoints", True)
    assert (made.video.min_pixels, made.video.max_pixels) == (4 * 1024, 24_576 * 1024)
    assert replace(given, image=ImageConfig(patch_size=8)).for_model(QWEN3_VL).image.patch_size == 8


def test_the_identity_of_stored_lengths_is_that_of_earlier_versions() -> None:
    assert repr(VideoConfig()) == (
        "VideoConfig(fps=2.0, min_frames=4, max_frames=768, min_pixels=100352, max_pixels=602112, total_pixels=19267584)"
    )
    assert "timestamps=True" in repr(VIDEO)
    assert repr(ImageConfig(jpeg_scaling=True)) == (
        "ImageConfig(min_pixels=3136, max_pixels=1003520, patch_size=14, spatial_merge_size=2, decode_limit=80000000)"
    )
    assert repr(ImageConfig(coordinates="relative")).endswith("decode_limit=80000000, coordinates='relative')")
    assert VideoConfig().for_model(WITHOUT_MODEL) == VideoConfig()


def video_processor(config: VideoConfig) -> Qwen3VLVideoProcessor:
    return Qwen3VLVideoProcessor(
        size={"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
        fps=config.fps,
        min_frames=config.min_frames,
        max_frames=config.max_frames,
        do_rescale=False,
        do_normalize=False,
        cap_pixels_per_frame=False,
    )


@pytest.mark.parametrize("size", [(64, 64), (20, 300), (333, 97), (700, 900), (31, 33), (32, 32)])
def test_patches_of_an_image_equal_those_of_transformers(size: tuple[int, int]) -> None:
    config = replace(IMAGE, min_pixels=64 * 64, max_pixels=256 * 256)
    pixels = np.random.default_rng(size[0]).integers(0, 256, (*size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    ours, grid = to_patches(decode(file.getvalue(), decode_limit=10**7), config)
    processor = Qwen2VLImageProcessor(
        patch_size=16, size={"shortest_edge": 64 * 64, "longest_edge": 256 * 256}, do_rescale=False, do_normalize=False
    )
    theirs = processor(images=[Image.open(file)], return_tensors="np")
    assert theirs["image_grid_thw"].tolist() == [list(grid)]
    np.testing.assert_array_equal(
        ours, theirs["pixel_values"].reshape(len(ours), 3, 2, 256)[:, :, 0].reshape(len(ours), -1)
    )


@pytest.mark.parametrize(
    ("frames", "fps", "size", "config"),
    [
        (2, 1.0, (30, 40), VIDEO),
        (5, 25.0, (64, 64), VIDEO),  # shorter than four frames at two a second
        (49, 10.0, (120, 90), VIDEO),
        (57, 11.0, (24, 200), VIDEO),  # lower than a visual token
        (300, 29.97, (60, 200), replace(VIDEO, max_pixels=40 * 4096)),  # reduced
        (301, 24.0, (40, 40), replace(VIDEO, max_frames=15)),  # the cap on frames, an odd number
        (30, 6.0, (33, 35), replace(VIDEO, min_pixels=64 * 4096)),  # enlarged
    ],
)
def test_frames_grid_and_patches_of_a_video_equal_those_of_transformers(
    frames: int, fps: float, size: tuple[int, int], config: VideoConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = np.random.default_rng(frames).integers(0, 256, (frames, *size, 3), dtype=np.uint8)
    theirs = video_processor(config)(
        torch.from_numpy(video).permute(0, 3, 1, 2),
        video_metadata=[VideoMetadata(total_num_frames=frames, fps=fps)],
        return_metadata=True,
    )
    layout = video_layout(MediaSize(*size, frames, fps), config, IMAGE)
    assert layout.frames.tolist() == list(theirs["video_metadata"][0].frames_indices)
    assert theirs["video_grid_thw"].tolist() == [list(layout.grid)]
    monkeypatch.setattr(video_module, "used_frames", lambda *_: iter(video[layout.frames]))
    ours = decode_video(b"", MediaSize(*size, frames, fps), layout, IMAGE)
    np.testing.assert_array_equal(ours, theirs["pixel_values_videos"].numpy())


@pytest.mark.parametrize("seed", range(30))
def test_grids_of_videos_equal_those_of_transformers(seed: int) -> None:
    generator = np.random.default_rng(seed)
    low, high = sorted(generator.integers(4096, 400_000, 2).tolist())
    config = replace(VIDEO, min_pixels=low, max_pixels=high)
    frames, height, width = generator.integers([2, 20, 20], [40, 600, 600]).tolist()
    layout = video_layout(MediaSize(height, width, frames, 4.0), config, IMAGE)
    expected = video_processor(config).get_num_of_video_patches(len(layout.frames), height, width)
    assert np.prod(layout.grid) == expected


def conversation(frames: int, fps: float) -> RawSample:
    """An image, a video, an image and a video; the media are not decoded."""
    content: list[Any] = [{"type": "image"}, "and", {"type": "video"}, {"type": "image"}, "what?", {"type": "video"}]
    record = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "this"}]}
    sizes = (MediaSize(70, 90), MediaSize(60, 80, frames, fps), MediaSize(64, 64), MediaSize(100, 50, 9, 3.0))
    return RawSample(key="k", record=json.dumps(record).encode(), is_json=True, media=(b"",) * 4, sizes=sizes)


@pytest.mark.parametrize(("frames", "fps"), [(20, 6.0), (45, 7.5), (3, 1.0)])
def test_tokens_and_positions_of_a_conversation_equal_those_of_transformers(
    frames: int, fps: float, tokenizer: Tokenizer, hf: Any
) -> None:
    image = replace(IMAGE, min_pixels=4096, max_pixels=64 * 1024)
    raw = conversation(frames, fps)
    encoding = encode_sample(raw, rules=SampleRules(image=image, video=VIDEO), tokenizer=tokenizer)
    made = decode_sample(raw, encoding, tokenizer=tokenizer, with_pixels=False)
    processor = Qwen3VLProcessor(
        Qwen2VLImageProcessor(patch_size=16, size={"shortest_edge": 4096, "longest_edge": 64 * 1024}),
        hf,
        video_processor(VIDEO),
    )
    wrapped = {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
    user = f"{wrapped['image']}and{wrapped['video']}{wrapped['image']}what?{wrapped['video']}"
    videos = [size for size in raw.sizes if size.frames]
    theirs = processor(
        text=[f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\nthis<|im_end|>\n"],
        images=[Image.new("RGB", (size.width, size.height)) for size in raw.sizes if not size.frames],
        videos=[np.zeros((size.frames, size.height, size.width, 3), np.uint8) for size in videos],
        video_metadata=[VideoMetadata(total_num_frames=size.frames, fps=size.fps) for size in videos],
        return_tensors="pt",
    )
    assert made.input_ids.tolist() == theirs["input_ids"][0].tolist()
    assert len(made.input_ids) == encoding.num_tokens
    assert made.image_grid_thw.tolist() == theirs["image_grid_thw"].tolist()
    assert made.video_grid_thw.tolist() == theirs["video_grid_thw"].tolist()
    model = Qwen3VLModel.__new__(Qwen3VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen3VLConfig()
    keys = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
    expected, _ = model.get_rope_index(**{key: theirs[key] for key in keys})
    grids = MediaGrids(images=made.image_grid_thw, videos=made.video_grid_thw, seconds_per_grid=[1.0, 1.0])
    assert tokenizer.video_pad_id is not None
    ours = segment_positions(
        made.input_ids,
        grids,
        kind="mrope_frames",
        image_pad_id=tokenizer.image_pad_id,
        video_pad_id=tokenizer.video_pad_id,
        spatial_merge_size=2,
    )
    np.testing.assert_array_equal(ours, expected[:, 0].numpy())


def test_a_video_of_an_extreme_aspect_ratio_is_refused() -> None:
    with pytest.raises(SampleError, match="over 200"):
        video_layout(MediaSize(32, 32 * 201, 8, 4.0), VIDEO, IMAGE)
