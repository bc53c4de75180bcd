# SPDX-License-Identifier: Apache-2.0
"""Complete checkpoints are found by their names, and say what they are."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mindvl_train import CheckpointError, RunConfig, run_training


def test_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    from mindvl_train.checkpoints.directory import complete_checkpoints, newest_checkpoint

    directory = tmp_path / "checkpoints"
    assert complete_checkpoints(directory) == []
    for name in ("step-00000009", "step-00000100", "step-00000200.unfinished", "notes"):
        (directory / name).mkdir(parents=True)
    assert [path.name for path in complete_checkpoints(directory)] == ["step-00000009", "step-00000100"]
    assert newest_checkpoint(tmp_path) == directory / "step-00000100"
    assert newest_checkpoint(directory / "step-00000009") == directory / "step-00000009"
    with pytest.raises(CheckpointError, match="contains no complete checkpoint"):
        newest_checkpoint(directory / "notes")


def test_the_manifest_says_what_the_checkpoint_is(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(steps=2)
    manifest = json.loads((run_training(config).checkpoint / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["optimizer_steps"]) == (2, 2, 2)
    assert (manifest["world_size"], manifest["device"]) == (1, "cpu")
    assert 4 * 96 * 0.8 < manifest["tokens"] <= 4 * 96  # two steps of two packs
    assert manifest["run"]["schedule"]["peak_lr"] == config.schedule.peak_lr
    assert manifest["model"]["language"]["vocab_size"] == 264
    assert set(manifest["versions"]) >= {"mindvl-train", "torch", "megatron-core"}
    assert 0 < manifest["loss_tokens"] < manifest["tokens"]


@dataclass(frozen=True)
class Point:
    """Something to make plain."""

    place: Path
    sizes: tuple[int, ...]


def test_configurations_become_plain_json_values() -> None:
    from mindvl_train.checkpoints.directory import plain_json

    value = plain_json({"point": Point(Path("a/b"), (1, 2)), 3: [None, 1.5, "x"]})
    assert value == {"point": {"place": "a/b", "sizes": [1, 2]}, "3": [None, 1.5, "x"]}
    assert json.loads(json.dumps(value)) == value
