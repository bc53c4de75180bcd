# SPDX-License-Identifier: Apache-2.0
"""Pages hold their digits, in order, and depend on nothing but their generator."""

import itertools

import numpy as np
import pytest

from mindvl_cli.demo.digits import load_scans
from mindvl_cli.demo.pages import Layout, compose_page, number_split, page_generator, random_number

LAYOUTS: tuple[Layout, ...] = ("line", "two_lines", "small", "large", "document")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_digit_lies_inside_the_page(layout: Layout) -> None:
    for index in range(40):
        generator = page_generator(3, index)
        number = random_number(generator, num_digits=1 + index % 6, split="train")
        page = compose_page(number, scans=load_scans("train"), layout=layout, generator=generator)
        height, width, channels = page.image.shape
        assert channels == 3
        assert page.number == number
        assert len(page.boxes) == len(number)
        for left, top, right, bottom in page.boxes:
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height


@pytest.mark.parametrize("layout", LAYOUTS)
def test_digits_stand_in_reading_order_and_do_not_overlap(layout: Layout) -> None:
    for index in range(40):
        generator = page_generator(4, index)
        number = random_number(generator, num_digits=6, split="train")
        boxes = compose_page(number, scans=load_scans("train"), layout=layout, generator=generator).boxes
        for first, second in itertools.pairwise(boxes):
            same_line = second[0] >= first[2]
            next_line = second[1] >= first[3]
            assert same_line or next_line


def test_boxes_hold_the_ink() -> None:
    generator = page_generator(5, 0)
    page = compose_page("407", scans=load_scans("train"), layout="line", generator=generator)
    outside = page.image.astype(int).copy()
    paper = outside[0, 0].copy()
    for left, top, right, bottom in page.boxes:
        assert np.abs(outside[top:bottom, left:right] - paper).max() > 60
        outside[top:bottom, left:right] = paper
    assert np.abs(outside - paper).max() == 0


def test_the_same_generator_gives_the_same_page() -> None:
    first, second = (
        compose_page("12", scans=load_scans("train"), layout="large", generator=page_generator(1, 2)) for _ in range(2)
    )
    other = compose_page("12", scans=load_scans("train"), layout="large", generator=page_generator(1, 3))
    assert np.array_equal(first.image, second.image)
    assert first.boxes == second.boxes
    assert first.boxes != other.boxes


def test_kept_back_numbers_are_never_drawn_for_training() -> None:
    generator = page_generator(0, 0)
    drawn = {split: {random_number(generator, num_digits=3, split=split) for _ in range(600)} for split in _splits()}
    assert not drawn["train"] & drawn["test"]
    assert not drawn["train"] & drawn["validation"]
    assert not drawn["validation"] & drawn["test"]
    assert all(number_split(number) == "test" for number in drawn["test"])
    assert all(100 <= int(number) <= 999 for number in drawn["test"])


def test_about_a_tenth_of_the_three_digit_numbers_is_kept_for_test() -> None:
    kept = [number for number in range(100, 1000) if number_split(str(number)) == "test"]
    assert 60 <= len(kept) <= 120


def _splits() -> tuple:
    return ("train", "validation", "test")
