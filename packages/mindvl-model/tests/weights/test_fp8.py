# SPDX-License-Identifier: Apache-2.0
"""Block-scaled fp8 weights in the format of DeepSeek-V3: whole tensors, blocks, and damaged files."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mindvl_model import WeightError
from mindvl_model.weights.directory import WeightDirectory, write_weights
from mindvl_model.weights.fp8 import dequantize
from mindvl_model.weights.sharding import Block

SHAPE = (300, 200)  # neither a multiple of 128


@pytest.fixture
def stored() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return (torch.randn(SHAPE) * 50).to(torch.float8_e4m3fn), torch.rand(3, 2) + 0.01


def by_element(values: Tensor, scales: Tensor) -> Tensor:
    """The definition: each value times the scale of its block of 128 x 128."""
    result = torch.empty(values.shape)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            result[row, column] = float(values[row, column]) * float(scales[row // 128, column // 128])
    return result.bfloat16()


def write(directory: Path, values: Tensor, scales: Tensor, block: list[int] | None = None) -> WeightDirectory:
    write_weights(directory, [("w.weight", values), ("w.weight_scale_inv", scales), ("norm.weight", torch.ones(4))])
    settings = {} if block is None else {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    (directory / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"} | settings))
    return WeightDirectory(directory)


def test_each_value_is_multiplied_by_the_scale_of_its_block(stored: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    directory = write(tmp_path, *stored)
    assert directory.names() == ["norm.weight", "w.weight"]
    assert directory.stored("w.weight").dtype == "BF16"
    expected = by_element(*stored)
    assert torch.equal(directory.read("w.weight"), expected)
    assert directory.bytes_read == 300 * 200 + 4 * 6

    rows, columns = directory.read("w.weight", Block(0, 1, 2)), directory.read("w.weight", Block(1, 3, 4))
    assert torch.equal(rows, expected[150:])
    assert torch.equal(columns, expected[:, 150:])
    thirds = directory.read("w.weight", Block(0, 1, 2, sections=3))
    assert torch.equal(thirds, torch.cat([expected[50:100], expected[150:200], expected[250:]]))


def test_the_block_size_is_read_from_the_directory(tmp_path: Path) -> None:
    values, scales = torch.ones(4, 6).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expected = torch.tensor([[1, 1, 1, 2, 2, 2]] * 2 + [[3, 3, 3, 4, 4, 4]] * 2)
    assert torch.equal(write(tmp_path, values, scales, [2, 3]).read("w.weight").int(), expected.int())
    with pytest.raises(WeightError, match="weight_block_size must be two positive integers, got 0"):
        write(tmp_path, values, scales, 0)  # type: ignore[arg-type]


def test_scales_of_another_shape_are_refused_by_name(stored: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"'w.weight_scale_inv' has shape \[2, 2\], but 'w.weight' .* needs \[3, 2\]"):
        write(tmp_path, stored[0], torch.ones(2, 2))


def test_a_block_that_starts_inside_a_scale_block(stored: tuple[Tensor, Tensor]) -> None:
    values, scales = stored
    piece = dequantize(values[100:290, 60:190], scales, first_row=100, first_column=60)
    assert torch.equal(piece, by_element(values, scales)[100:290, 60:190])
