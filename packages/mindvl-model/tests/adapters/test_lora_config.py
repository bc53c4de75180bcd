# SPDX-License-Identifier: Apache-2.0
"""The configuration of adapters: scaling, and values that are refused."""

import math

import pytest

from mindvl_model.adapters import LoRAConfig
from mindvl_model.adapters.lora_config import quantization_problem


def test_the_scaling_is_that_of_lora_and_of_rslora() -> None:
    assert LoRAConfig(rank=16, alpha=32).scaling == 2
    assert LoRAConfig(rank=16, alpha=32, rslora=True).scaling == 8


def test_bytes_of_a_quantized_weight_include_its_scales() -> None:
    assert LoRAConfig().base_bytes is None
    assert LoRAConfig(base_bits=8, double_quantization=False).base_bytes == 1 + 4 / 64
    assert LoRAConfig(base_bits=4).base_bytes == 0.5 + 1 / 64 + 4 / (64 * 256)


def test_quantization_is_refused_on_npus_only_if_it_is_asked_for() -> None:
    assert quantization_problem(None, "npu") is quantization_problem(LoRAConfig(), "npu") is None
    assert quantization_problem(LoRAConfig(base_bits=4), "cuda") is None
    problem = quantization_problem(LoRAConfig(base_bits=4), "npu")
    assert problem == "adapter.base_bits: is 4, but bitsandbytes has no kernels for NPUs. Set adapter.base_bits=16."


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
