# SPDX-License-Identifier: Apache-2.0
"""The configuration of adapters: scaling, and values that are refused."""

import math

import pytest

from mindvl_model.adapters import LoRAConfig


def test_the_scaling_is_that_of_lora_and_of_rslora() -> None:
    assert LoRAConfig(rank=16, alpha=32).scaling == 2
    assert LoRAConfig(rank=16, alpha=32, rslora=True).scaling == 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 0}, "rank: must be between 1 and 65,536, got 0"),
        ({"alpha": math.nan}, "alpha: must be a finite number > 0, got nan"),
        ({"dropout": 1.0}, r"dropout: must be in \[0, 1\), got 1.0"),
        ({"targets": ()}, "targets: must name at least one layer"),
    ],
)
def test_values_without_meaning_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**values)  # type: ignore[arg-type]
