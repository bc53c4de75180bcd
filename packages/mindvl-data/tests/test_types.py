# SPDX-License-Identifier: Apache-2.0
"""Batch: the model's inputs and their device; and importing the package without loading torch."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import mindvl_data
from mindvl_data import DataConfig, Loader


def test_a_batch_moves_with_its_tensors_and_keeps_on_the_host_what_is_planned_with_there(
    make_config: Callable[..., DataConfig],
) -> None:
    with Loader(make_config(num_threads=0), global_batch_size=1, position_kind="rope") as loader:
        batch = next(loader)
    moved = batch.to("meta")
    devices = {name: value.device.type for name, value in moved.model_inputs().items() if name != "max_seqlen"}
    assert devices == {
        "input_ids": "meta", "labels": "meta", "position_ids": "meta", "pixel_values": "meta",
        "pixel_values_videos": "meta",
        "cu_seqlens": "cpu", "image_grid_thw": "cpu", "video_grid_thw": "cpu", "loss_positions": "cpu",
    }  # fmt: skip
    assert moved.samples == batch.samples
    assert set(batch.model_inputs()) == {
        "input_ids", "labels", "position_ids", "cu_seqlens", "max_seqlen", "pixel_values", "image_grid_thw",
        "pixel_values_videos", "video_grid_thw", "loss_positions",
    }  # fmt: skip


def test_a_loader_pins_the_tensors_that_move_to_the_device_and_no_others(
    make_config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    with Loader(make_config(num_threads=0), global_batch_size=1, position_kind="rope") as loader:
        next(loader)
    assert pinned == []
    with Loader(make_config(num_threads=0), global_batch_size=1, position_kind="rope", pin_memory=True) as loader:
        batch = next(loader)
    moving = (batch.input_ids, batch.labels, batch.position_ids, batch.pixel_values, batch.pixel_values_videos)
    assert {id(tensor) for tensor in pinned} == {id(tensor) for tensor in moving}


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import mindvl_data", "torch numpy PIL pyarrow fsspec tokenizers av"),
        ("from mindvl_data import DataConfig", "torch numpy PIL pyarrow fsspec tokenizers av"),
        ("from mindvl_data import index_directory, load_tokenizer, write_shards", "torch pyarrow fsspec av"),
    ],
)
def test_an_import_loads_only_the_libraries_it_needs(statement: str, absent: str) -> None:
    code = f"import sys; {statement}; print([name for name in {absent.split()!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_public_name_is_found_and_an_unknown_one_is_not() -> None:
    assert all(hasattr(mindvl_data, name) for name in mindvl_data.__all__)
    assert set(mindvl_data.__all__) <= set(dir(mindvl_data))
    assert not hasattr(mindvl_data, "no_such_name")
