# SPDX-License-Identifier: Apache-2.0
"""Regions from several formats, masks and points."""

import numpy as np
import pytest

from mindvl_data.curation.regions import Region, decode_mask, inside, point_in_mask, point_of, regions_of
from mindvl_data.errors import SampleError

DOG = Region("a dog", (10, 20, 50, 40))
GRIT = [6, 11, 0.1, 0.4, 0.5, 0.8, 0.9]  # characters 6 to 11, box as shares of 100 x 50 pixels, score


@pytest.mark.parametrize(
    "body",
    [
        {"regions": [{"phrase": "a dog", "xyxy": [10, 20, 50, 40]}]},
        {"annotations": [{"bbox": [10, 20, 40, 20], "caption": "a dog"}]},
        {"annotations": [{"bbox": [10, 20, 40, 20], "category_id": 3}], "categories": [{"id": 3, "name": "a dog"}]},
        {"caption": "I see a dog", "noun_chunks": [GRIT], "ref_exps": [[*GRIT[:6], 1]]},
        {"bboxes": [[10, 20, 50, 40]], "labels": ["a dog"]},
        {"content": [{"type": "image"}, "Look:\na dog", {"type": "box", "image": 0, "xyxy": [10, 20, 50, 40]}]},
    ],
)
def test_each_format_gives_the_same_region(body: dict[str, object]) -> None:
    assert regions_of(body, width=100, height=50) == [DOG]


def test_fields_of_another_form_are_refused() -> None:
    for body in (
        {"regions": [{"phrase": "x"}]},
        {"annotations": [{"bbox": [1, 2]}]},
        {"bboxes": [[1, 2, 3, 4]], "labels": []},
    ):
        with pytest.raises(SampleError, match="do not have a known form"):
            regions_of(body, 10, 10)


def test_boxes_are_limited_to_the_image_and_small_ones_left_out() -> None:
    assert inside(Region(" a \n b ", (-5, 2, 50, 9)), 20, 10, 4) == Region("a b", (0, 2, 20, 9))
    assert inside(Region("a", (18, 2, 50, 9)), 20, 10, 4) is None
    assert inside(Region(" ", (0, 0, 9, 9)), 20, 10, 4) is None
    assert inside(Region("a", (0, 0, float("nan"), 9)), 20, 10, 4) is None


def test_the_point_of_a_mask_lies_inside_of_it_and_that_of_a_box_in_its_center() -> None:
    ring = np.ones((5, 5), bool)
    ring[1:4, 1:4] = False  # the centroid, (2, 2), is not in the mask
    x, y = point_in_mask(ring) or (0.0, 0.0)
    assert ring[int(y), int(x)]
    assert point_in_mask(np.zeros((2, 2), bool)) is None
    assert point_of(DOG) == (30, 30)
    assert point_of(Region("a", (0, 0, 4, 4), (1, 1))) == (1, 1)


def test_masks_are_decoded_from_polygons_and_run_lengths() -> None:
    expected = np.zeros((3, 4), bool)
    expected[1:3, 1] = True
    expected[0:2, 2] = True
    # Down the columns: 3 + 1 zeros, 2 ones, 0 zeros, 2 ones (two runs because of the zero), 4 zeros.
    assert (decode_mask({"size": [3, 4], "counts": [4, 4, 4]}, 4, 3) == expected).all()
    # The same counts in COCO's text: 4 is the character 48 + 4; later ones are written as a difference to two before.
    assert (decode_mask({"size": [3, 4], "counts": "444"}, 4, 3) == expected).all()
    for counts, text in [([4, 1, 1, 1, 5], "41104"), ([4, 2, 1, 1, 4], "421O3")]:  # 1 - 2 is -1, which is written as O
        as_list = decode_mask({"size": [3, 4], "counts": counts}, 4, 3)
        assert (decode_mask({"size": [3, 4], "counts": text}, 4, 3) == as_list).all()
    square = decode_mask([[1, 1, 3, 1, 3, 2, 1, 2]], 4, 3)
    assert (square[1:3, 1:4]).all()
    assert square.sum() == 6


def test_masks_of_another_size_are_refused() -> None:
    with pytest.raises(SampleError, match="a mask of 5 x 3 pixels for an image of 4 x 3"):
        decode_mask({"size": [3, 5], "counts": [15]}, 4, 3)
    with pytest.raises(SampleError, match="do not fill the mask"):
        decode_mask({"size": [3, 4], "counts": [5]}, 4, 3)
