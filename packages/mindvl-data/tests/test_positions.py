# SPDX-License-Identifier: Apache-2.0
"""Positions: by hand, and against transformers' Qwen2.5-VL."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from mindvl_data.positions import MediaGrids, PositionKind, segment_positions

IMAGE, VIDEO = 9, 8


def tokens(*runs: int) -> np.ndarray:
    """Text runs and image runs in turn."""
    return np.concatenate([np.full(run, IMAGE if number % 2 else 1, np.int64) for number, run in enumerate(runs)])


def positions(
    ids: np.ndarray,
    images: Sequence[Sequence[int]],
    kind: PositionKind,
    videos: Sequence[Sequence[int]] = (),
    seconds: Sequence[float] = (),
) -> np.ndarray:
    grids = [np.array(grid, np.int64).reshape(-1, 3) for grid in (images, videos)]
    media = MediaGrids(images=grids[0], videos=grids[1], seconds_per_grid=seconds)
    return segment_positions(ids, media, kind=kind, image_pad_id=IMAGE, video_pad_id=VIDEO, spatial_merge_size=2)


def test_rope_counts_every_token() -> None:
    assert positions(tokens(2, 4, 1), [[1, 4, 4]], "rope").tolist() == [list(range(7))] * 3


def test_mrope_of_one_small_image_by_hand() -> None:
    result = positions(tokens(2, 6, 2), [[1, 4, 6]], "mrope")
    assert result[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    assert result[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
    assert result[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]


def test_mrope_of_a_video_moves_two_positions_along_time_in_a_second() -> None:
    ids = np.array([1, VIDEO, VIDEO, VIDEO, VIDEO, VIDEO, VIDEO, 1])
    result = positions(ids, [], "mrope", videos=[[3, 2, 4]], seconds=[0.75])
    assert result[0].tolist() == [0, 1, 1, 2, 2, 4, 4, 3]  # 0, 1.5 and 3 positions after the first
    assert result[2].tolist() == [0, 1, 2, 1, 2, 1, 2, 3]


def test_text_after_a_long_video_continues_by_the_rule_of_the_transformers_version() -> None:
    ids = np.array([1, *[VIDEO] * 4, 1, 1])  # four steps of one visual token, two positions apart
    new = positions(ids, [], "mrope", videos=[[4, 2, 2]], seconds=[1.0])
    old = positions(ids, [], "mrope_all_axes", videos=[[4, 2, 2]], seconds=[1.0])
    assert new[0].tolist() == [0, 1, 3, 5, 7, 2, 3]
    assert old[0].tolist() == [0, 1, 3, 5, 7, 8, 9]
    assert (new[1].tolist(), old[1].tolist()) == ([0, 1, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 8, 9])


def test_each_temporal_patch_of_a_video_with_timestamps_has_the_positions_of_an_image() -> None:
    ids = np.array([1, VIDEO, VIDEO, 1, VIDEO, VIDEO, 1])
    result = positions(ids, [], "mrope_frames", videos=[[2, 2, 4]], seconds=[0.75])
    assert result.tolist() == [[0, 1, 1, 3, 4, 4, 6], [0, 1, 1, 3, 4, 4, 6], [0, 1, 2, 3, 4, 5, 6]]


def by_the_words_of_version_4(
    ids: np.ndarray, images: Sequence[Sequence[int]], videos: Sequence[Sequence[int]], seconds: Sequence[float]
) -> np.ndarray:
    """Token by token: whatever comes next begins at one more than the largest position there is, on any axis."""
    found: list[list[int]] = []
    place, image, video = 0, 0, 0
    while place < len(ids):
        begin = max((max(axes) for axes in found), default=-1) + 1
        if ids[place] == 1:
            found.append([begin] * 3)
            place += 1
            continue
        is_video = ids[place] == VIDEO
        time, height, width = (videos[video] if is_video else images[image])[:3]
        interval = torch.tensor(2 * seconds[video] if is_video else 1.0)
        for step in range(time):
            moment = int((torch.tensor(step) * interval).long())
            found += [[begin + moment, begin + h, begin + w] for h in range(height // 2) for w in range(width // 2)]
        place += time * height * width // 4
        video, image = video + is_video, image + (not is_video)
    return np.array(found).T


def published(
    ids: np.ndarray, images: Sequence[Sequence[int]], videos: Sequence[Sequence[int]], seconds: Sequence[float]
) -> np.ndarray:
    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen2_5_VLConfig()
    model.config.vision_config.tokens_per_second = 2
    types = (ids == IMAGE).astype(np.int64) + 2 * (ids == VIDEO)
    expected, _ = model.get_rope_index(
        torch.from_numpy(ids)[None],
        mm_token_type_ids=torch.from_numpy(types)[None],
        image_grid_thw=torch.tensor(images, dtype=torch.int64).reshape(-1, 3),
        video_grid_thw=torch.tensor(videos, dtype=torch.int64).reshape(-1, 3),
        second_per_grid_ts=torch.tensor(seconds),
    )
    return expected[:, 0].numpy()


@pytest.mark.parametrize("seed", range(40))
def test_mrope_equals_transformers_on_random_layouts_of_images_and_videos(seed: int) -> None:
    ids, images, videos, seconds = random_layout(seed)
    ours = positions(ids, images, "mrope", videos, seconds)
    np.testing.assert_array_equal(ours, published(ids, images, videos, seconds))


@pytest.mark.parametrize("seed", range(40))
def test_mrope_of_all_axes_equals_version_4_on_random_layouts(seed: int) -> None:
    ids, images, videos, seconds = random_layout(seed)
    ours = positions(ids, images, "mrope_all_axes", videos, seconds)
    np.testing.assert_array_equal(ours, by_the_words_of_version_4(ids, images, videos, seconds))


def random_layout(seed: int) -> tuple[np.ndarray, list[list[int]], list[list[int]], list[float]]:
    """Token ids with runs of images and videos between text, and what the runs stand for."""
    generator = np.random.default_rng(seed)
    ids: list[int] = [1] * int(generator.integers(1, 9))
    images: list[list[int]] = []
    videos: list[list[int]] = []
    seconds: list[float] = []
    for _ in range(generator.integers(1, 7)):
        height, width = (2 * generator.integers(1, 9, 2)).tolist()
        if generator.random() < 0.5:
            images.append([1, height, width])
            ids += [IMAGE] * (height * width // 4)
        else:
            videos.append([int(generator.integers(1, 12)), height, width])
            seconds.append(float(generator.choice([1.0, 0.5, 1 / 3, generator.uniform(0.05, 4)])))
            ids += [VIDEO] * (videos[-1][0] * height * width // 4)
        ids += [1] * int(generator.integers(1, 9))
    return np.array(ids), images, videos, seconds
