# SPDX-License-Identifier: Apache-2.0
"""The scans are split cleanly and drawn as asked."""

import numpy as np
import pytest

from mindvl_cli.demo.digits import SPLITS, DigitStyle, draw_digit, load_scans, random_style


def test_every_scan_is_in_exactly_one_split() -> None:
    parts = [load_scans(split).indices for split in SPLITS]
    together = np.concatenate(parts)
    assert len(together) == 1797
    assert sorted(together) == list(range(1797))


def test_every_split_has_the_same_share_of_every_digit() -> None:
    for split, share in (("train", 0.80), ("validation", 0.08), ("test", 0.12)):
        counts = [len(places) for places in load_scans(split).by_digit]  # type: ignore[arg-type]
        assert min(counts) > 0.9 * share * 174
        assert max(counts) < 1.1 * share * 183


def test_labels_belong_to_the_images() -> None:
    from sklearn.datasets import load_digits

    scans = load_scans("test")
    images, labels = load_digits(return_X_y=True)
    for image, label, index in zip(scans.images[:20], scans.labels, scans.indices, strict=False):
        assert label == labels[index]
        inner = np.asarray(image)[2:-2, 2:-2]
        assert np.array_equal(inner, np.round(images[index].reshape(8, 8) * 255 / 16))


@pytest.mark.parametrize("height", [11, 22, 46])
def test_a_digit_is_drawn_about_as_high_as_asked(height: int) -> None:
    heights = [draw_digit(scan, DigitStyle(height=height)).shape[0] for scan in load_scans("train").images[:50]]
    assert 0.85 * height <= np.mean(heights) <= 1.15 * height


def test_a_drawn_digit_is_cut_to_its_ink() -> None:
    generator = np.random.default_rng(0)
    for scan in load_scans("train").images[:50]:
        ink = draw_digit(scan, random_style(generator, height=30))
        assert ink[0].max() > 0
        assert ink[-1].max() > 0
        assert ink[:, 0].max() > 0
        assert ink[:, -1].max() > 0


def test_bolder_strokes_have_more_ink() -> None:
    scan = load_scans("train").images[0]
    thin = draw_digit(scan, DigitStyle(height=30, weight=0.8))
    bold = draw_digit(scan, DigitStyle(height=30, weight=1.3))
    assert bold.sum() > thin.sum()


def test_a_positive_rotation_turns_the_digit_without_changing_its_size_much() -> None:
    scan = load_scans("train").images[0]
    straight = draw_digit(scan, DigitStyle(height=40))
    turned = draw_digit(scan, DigitStyle(height=40, rotation=10))
    assert not np.array_equal(straight, turned)
    assert abs(straight.shape[0] - turned.shape[0]) <= 6
