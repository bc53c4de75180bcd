# SPDX-License-Identifier: Apache-2.0
"""A checkpoint becomes a directory that transformers loads, and that directory starts another run."""

import json
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from mindvl_model import ModelError
from mindvl_train import CheckpointError, InitSection, ModelSection, RunConfig, run_training
from mindvl_train.checkpoints.convert import ConvertSource, convert_to_checkpoint
from mindvl_train.checkpoints.export import export_checkpoint, model_config
from mindvl_train.checkpoints.integrity import seal

Read = Callable[[Path], dict[str, torch.Tensor]]


@pytest.mark.slow
def test_an_exported_run_loads_in_transformers_and_starts_another_run(
    make_config: Callable[..., RunConfig], read_tensors: Read, tmp_path: Path
) -> None:
    result = run_training(make_config(steps=1))
    directory = tmp_path / "model"
    export_checkpoint(result.out, directory, max_pixels=28 * 28 * 3)
    loaded = AutoModelForImageTextToText.from_pretrained(directory, trust_remote_code=True)
    stored = read_tensors(result.checkpoint)
    assert torch.equal(loaded.lm_head.weight, stored["language.output_layer.weight"])
    processor = AutoProcessor.from_pretrained(directory, trust_remote_code=True)
    assert processor.image_processor.size["shortest_edge"] == 28 * 28
    assert processor.image_processor.size["longest_edge"] == 28 * 28 * 3

    still = replace(make_config().schedule, steps=1, peak_lr=0.0, min_lr=0.0)
    section = ModelSection(directory=directory)
    again = make_config("again", schedule=still, seed=5, model=section, init=InitSection(model=directory))
    weights = read_tensors(run_training(again).checkpoint)
    assert all(torch.equal(weights[name], tensor) for name, tensor in stored.items() if "optimizer" not in name)

    export_checkpoint(result.checkpoint, tmp_path / "small", dtype="bf16")
    small = AutoModelForImageTextToText.from_pretrained(tmp_path / "small", trust_remote_code=True)
    assert torch.equal(small.lm_head.weight, stored["language.output_layer.weight"].bfloat16())
    with pytest.raises(ModelError, match="already exists"):
        export_checkpoint(result.out, directory)
    with pytest.raises(CheckpointError, match="contains no complete checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "nothing")


@pytest.fixture(scope="module")
def trained(config_for: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    return run_training(config_for(tmp_path_factory.mktemp("trained") / "run", steps=1)).out


def edit(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    text = manifest.read_text()
    changed = re.sub(r'("rotary_base": )\d+', r"\g<1>77777", text)
    assert changed != text
    manifest.write_text(changed)


def forget(checkpoint: Path) -> None:
    """Edit, and take the file off the list of those that are checked."""
    edit(checkpoint)
    listed = json.loads((checkpoint / "files.json").read_text())
    del listed["manifest.json"]
    (checkpoint / "files.json").write_text(json.dumps(listed))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit, "manifest.json has"),
        (forget, "files.json does not list manifest.json"),
        (lambda checkpoint: (checkpoint / "ledger.json").unlink(), "ledger.json is missing"),
        (lambda checkpoint: (checkpoint / "files.json").unlink(), "files.json is missing"),
        (lambda checkpoint: (checkpoint / "manifest.json").write_text("[1]"), "instead of an object"),
        (lambda checkpoint: (checkpoint / "manifest.json").write_text("[" * 99999), "cannot be read"),
        (lambda checkpoint: (checkpoint / "tensors/__0_0.distcp").open("ab").write(b"x"), "distcp has"),
    ],
)
def test_a_damaged_checkpoint_is_not_exported(
    trained: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(tmp_path / "run", tmp_path / "model")
    assert not list(tmp_path.glob("model*"))


def test_a_full_disk_ends_an_export_in_a_sentence_and_leaves_nothing(trained: Path, tmp_path: Path) -> None:
    with (
        largest_file(20_000),
        pytest.raises(ModelError, match=r"model: cannot be written \(File too large\)"),
    ):
        export_checkpoint(trained, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_a_conversion_in_a_sentence_and_leaves_nothing(trained: Path, tmp_path: Path) -> None:
    export_checkpoint(trained, tmp_path / "model")
    with (
        largest_file(20_000),
        pytest.raises(ModelError, match=r"run: cannot be written \(File too large\)"),
    ):
        convert_to_checkpoint(ConvertSource(model=tmp_path / "model"), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("image", "stored"),
    [
        ({}, None),  # a run with the Qwen2.5-VL encoder and its unit
        ({"coordinates": "relative"}, "relative"),
    ],
)
def test_a_unit_of_coordinates_that_is_not_that_of_the_encoder_is_stored(
    trained: Path, tmp_path: Path, image: dict[str, str], stored: str | None
) -> None:
    with changed_manifest(trained, tmp_path / "run") as manifest:
        assert manifest["run"]["data"]["image"]["coordinates"] == "absolute"
        manifest["run"]["data"]["image"].update(image)
    export_checkpoint(tmp_path / "run", tmp_path / "model")
    images = json.loads((tmp_path / "model/processor_config.json").read_text())["image_processor"]
    assert images.get("coordinates") == stored


def test_the_processor_files_of_a_run_come_back_through_a_checkpoint(trained: Path, tmp_path: Path) -> None:
    """Limits, video settings, unit of coordinates and scaled decoding are those of the run, and of the imported directory."""
    with changed_manifest(trained, tmp_path / "run") as manifest:
        manifest["run"]["data"]["image"] |= {"max_pixels": 7840, "coordinates": "relative", "jpeg_scaling": True}
        manifest["run"]["data"]["video"] |= {"fps": 1.5, "max_frames": 8, "max_pixels": 7840, "total_pixels": 20 * 784}
    export_checkpoint(tmp_path / "run", tmp_path / "model")
    convert_to_checkpoint(ConvertSource(model=tmp_path / "model"), tmp_path / "again")
    export_checkpoint(tmp_path / "again", tmp_path / "copy")
    stored, copied = (json.loads((tmp_path / name / "processor_config.json").read_text()) for name in ("model", "copy"))
    assert stored == copied
    videos = stored["video_processor"]
    assert (videos["fps"], videos["max_frames"], videos["size"]["longest_edge"]) == (1.5, 8, 7840)
    assert videos["max_video_tokens"] == 23  # 90 % are 20.7


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"tokenizer": 3, "image": {}},
        {"tokenizer": "x", "image": {"min_pixels": "x"}},
        {"tokenizer": "x", "image": {"min_pixels": 784, "max_pixels": 784}, "video": {"fps": "x"}},
    ],
)
def test_a_forged_manifest_is_a_sentence(trained: Path, tmp_path: Path, data: object) -> None:
    with changed_manifest(trained, tmp_path / "run") as manifest:
        manifest["run"]["data"] = data
    with pytest.raises(CheckpointError, match="section run has no valid"):
        export_checkpoint(tmp_path / "run", tmp_path / "model")


@contextmanager
def changed_manifest(trained: Path, copy: Path) -> Iterator[dict[str, Any]]:
    """The manifest of a copy of a run; it is written back with checksums that fit."""
    shutil.copytree(trained, copy)
    (checkpoint,) = (copy / "checkpoints").iterdir()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    yield manifest
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (checkpoint / "files.json").unlink()
    seal(checkpoint)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A disk that takes no more of a file than that, which to a program is as a full one."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_manifest_gives_the_model_back(make_config: Callable[..., RunConfig]) -> None:
    from mindvl_train.checkpoints.directory import plain_json

    config = make_config().model.resolved
    assert model_config({"model": json.loads(json.dumps(plain_json(config)))}) == config
