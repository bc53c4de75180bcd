# SPDX-License-Identifier: Apache-2.0
"""Values of a merge are checked when the configuration is made."""

from pathlib import Path

import pytest

from mindvl_merge import MergeConfig, MergeConfigError

TWO = (Path("a"), Path("b"))


def test_equal_weights_are_the_default():
    assert MergeConfig(models=TWO, out=Path("c")).model_weights == (0.5, 0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"models": ()}, "models: is empty"),
        ({"weights": (1.0,)}, "weights: got 1 weights for 2 models"),
        ({"weights": (0.5, 0.6)}, "with sum 1.1"),
        ({"weights": (float("nan"), 1.0)}, "must be finite"),
        ({"max_shard_bytes": 0}, "max_shard_bytes: must be positive, got 0"),
        ({"out": Path("a\0b")}, "has a null character"),
    ],
)
def test_wrong_values_are_refused(values, message):
    with pytest.raises(MergeConfigError, match=message):
        MergeConfig(**{"models": TWO, "out": Path("c"), **values})


def test_another_sum_is_accepted_when_requested():
    assert MergeConfig(models=TWO, out=Path("c"), weights=(1.0, 1.0), any_weight_sum=True).model_weights == (1.0, 1.0)
