# SPDX-License-Identifier: Apache-2.0
"""A checkpoint becomes a folder that transformers loads, and that folder starts another run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from mindvl_model import ModelError
from mindvl_train import CheckpointError, InitSection, ModelSection, RunConfig, run_training
from mindvl_train.checkpoints.export import export_checkpoint, model_config

Read = Callable[[Path], dict[str, torch.Tensor]]


def test_an_exported_run_loads_in_transformers_and_starts_another_run(
    make_config: Callable[..., RunConfig], read_tensors: Read, tmp_path: Path
) -> None:
    result = run_training(make_config(steps=1))
    folder = tmp_path / "model"
    export_checkpoint(result.out, folder, max_pixels=28 * 28 * 3)
    twin = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
    stored = read_tensors(result.checkpoint)
    assert torch.equal(twin.lm_head.weight, stored["language.output_layer.weight"])
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    assert processor.image_processor.size["shortest_edge"] == 28 * 28
    assert processor.image_processor.size["longest_edge"] == 28 * 28 * 3

    still = replace(make_config().schedule, steps=1, peak_lr=0.0, min_lr=0.0)
    section = ModelSection(folder=folder)
    again = make_config("again", schedule=still, seed=5, model=section, init=InitSection(model=folder))
    weights = read_tensors(run_training(again).checkpoint)
    assert all(torch.equal(weights[name], tensor) for name, tensor in stored.items() if "optimizer" not in name)

    export_checkpoint(result.checkpoint, tmp_path / "small", dtype="bf16")
    small = AutoModelForImageTextToText.from_pretrained(tmp_path / "small", trust_remote_code=True)
    assert torch.equal(small.lm_head.weight, stored["language.output_layer.weight"].bfloat16())
    with pytest.raises(ModelError, match="exists already"):
        export_checkpoint(result.out, folder)
    with pytest.raises(CheckpointError, match="no complete checkpoint here"):
        export_checkpoint(tmp_path, tmp_path / "nothing")


def test_a_manifest_gives_the_model_back(make_config: Callable[..., RunConfig]) -> None:
    import json

    from mindvl_train.checkpoints.folder import plain_json

    config = make_config().model.resolve()
    assert model_config({"model": json.loads(json.dumps(plain_json(config)))}) == config
