# SPDX-License-Identifier: Apache-2.0
"""The unit of coordinates gives the size that an image has in them."""

import pytest

from mindvl_merge.evaluation.benchmark import Item
from mindvl_merge.evaluation.predictions import Prediction
from mindvl_merge.evaluation.run import score_prediction

ITEM = Item(id="i", task="t", images=(), question="q", answer="", score="box", box=(10.0, 10.0, 30.0, 20.0))


@pytest.mark.parametrize(
    ("coordinates", "units", "score"),
    [("absolute", ((56, 84), (28, 28)), 0), ("relative", ((1000, 1000), (1000, 1000)), 1)],
)
def test_relative_coordinates_do_not_depend_on_the_resized_image(coordinates, units, score):
    """The first image has 40 x 80 pixels, so (125, 250) in thousandths is the pixel (10, 10)."""
    prediction = Prediction(
        item=ITEM,
        answer="(125,250),(375,500)",
        original=((40, 80), (20, 20)),
        resized=((56, 84), (28, 28)),
        coordinates=coordinates,
    )
    assert prediction.units == units
    assert score_prediction(prediction) == score
