# SPDX-License-Identifier: Apache-2.0
"""Files written one tensor at a time can be read by safetensors, for all data types, sizes and names."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mindvl_model.weights import stream
from mindvl_model.weights.stream import HEADER_BYTES, write_weights

TENSORS = {
    "scalar": torch.tensor(3.0),
    "odd": torch.arange(3, dtype=torch.bfloat16),  # ends at an address where no float32 may begin
    "after": torch.arange(4, dtype=torch.float32),
    "empty": torch.zeros(0, 5),
    "turned": torch.arange(6.0).view(2, 3).T,
    "fp8": torch.arange(5.0).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False]),
    'a "name" in quotes': torch.arange(2),
}


def test_every_type_and_shape_comes_back(tmp_path: Path) -> None:
    write_weights(tmp_path, TENSORS.items())
    read = {name: one for file in tmp_path.glob("*.safetensors") for name, one in load_file(file).items()}
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].float(), tensor.float())
    assert not list(tmp_path.glob("*.tmp"))


def test_files_hold_at_most_their_limit_and_the_index_knows_all(tmp_path: Path) -> None:
    sizes = [30, 30, 30, 200, 10]
    write_weights(tmp_path, ((f"t{number}", torch.zeros(size)) for number, size in enumerate(sizes)), 4 * 70)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert index["weight_map"] == {"t0": files[0], "t1": files[0], "t2": files[1], "t3": files[2], "t4": files[3]}
    assert index["metadata"]["total_size"] == 4 * 300
    assert (tmp_path / files[0]).stat().st_size == HEADER_BYTES + 4 * 60
    assert load_file(tmp_path / files[2])["t3"].shape == (200,)  # larger than the limit: alone


def test_a_full_header_begins_the_next_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HEADER_BYTES", 1024)
    write_weights(tmp_path, [(f"t{number}", torch.tensor([number])) for number in range(12)])
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 1
    assert [int(one) for file in files for _, one in sorted(load_file(file).items())] == list(range(12))
