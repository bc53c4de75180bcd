# SPDX-License-Identifier: Apache-2.0
"""Checkpoints appear whole or not at all, are pruned, and say what is wrong with a damaged one."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mindvl_train import CheckpointConfig, CheckpointError, InitSection, ModelSection, RunConfig, run_training

TWO_STEPS: dict[str, Any] = {"steps": 2, "checkpoints": CheckpointConfig(every_steps=1, keep_last=5)}


@pytest.fixture(scope="module")
def original(config_for: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, both saved."""
    return run_training(config_for(tmp_path_factory.mktemp("original") / "run", **TWO_STEPS)).out


@pytest.fixture
def saved(original: Path, make_config: Callable[..., RunConfig]) -> tuple[RunConfig, Path]:
    """A copy of that run to damage; the folder of its checkpoints."""
    config = make_config(**TWO_STEPS)
    shutil.copytree(original, config.out)
    return config, config.out / "checkpoints"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_kill_between_tensors_and_rename_leaves_the_older_checkpoint_in_charge(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(steps=4, checkpoints=CheckpointConfig(every_steps=2))

    def killed(source: Any, target: Any) -> None:
        if str(target).endswith("step-00000004"):
            raise OSError("killed")
        rename(source, target)

    rename = os.replace
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(OSError, match="killed"):
            run_training(config)
    folder = config.out / "checkpoints"
    assert names(folder) == ["step-00000002", "step-00000004.unfinished"]
    seen: list[int] = []
    run_training(config, on_step=lambda step, loss: seen.append(step))
    assert seen == [3, 4]
    assert names(folder) == ["step-00000002", "step-00000004"]


def test_only_the_newest_are_kept(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(steps=5, checkpoints=CheckpointConfig(every_steps=1, keep_last=2))
    run_training(config)
    assert names(config.out / "checkpoints") == ["step-00000004", "step-00000005"]


def test_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    from mindvl_train.checkpoints import complete, newest

    folder = tmp_path / "checkpoints"
    assert complete(folder) == []
    for name in ("step-00000009", "step-00000100", "step-00000200.unfinished", "notes"):
        (folder / name).mkdir(parents=True)
    assert [path.name for path in complete(folder)] == ["step-00000009", "step-00000100"]
    assert newest(tmp_path) == folder / "step-00000100"
    assert newest(folder / "step-00000009") == folder / "step-00000009"
    with pytest.raises(CheckpointError, match="no complete checkpoint here"):
        newest(folder / "notes")


def test_the_manifest_says_what_the_checkpoint_is(saved: tuple[RunConfig, Path]) -> None:
    config, folder = saved
    manifest = json.loads((folder / "step-00000002" / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"]) == (1, 2)
    assert 4 * 96 * 0.8 < manifest["tokens"] <= 4 * 96  # two steps of two rows
    assert manifest["run"]["schedule"]["peak_lr"] == config.schedule.peak_lr
    assert manifest["model"]["language"]["vocab_size"] == 264
    assert set(manifest["versions"]) >= {"mindvl-train", "torch", "megatron-core"}
    assert 0 < manifest["label_tokens"] < manifest["tokens"]


def cut_tensors(checkpoint: Path) -> None:
    for file in (checkpoint / "tensors").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def remove_tensors(checkpoint: Path) -> None:
    for file in (checkpoint / "tensors").glob("*.distcp"):
        file.unlink()


def cut_metadata(checkpoint: Path) -> None:
    file = checkpoint / "tensors" / ".metadata"
    file.write_bytes(file.read_bytes()[:100])


def empty_metadata(checkpoint: Path) -> None:
    (checkpoint / "tensors" / ".metadata").write_bytes(b"")


def remove_tensor_folder(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "tensors")


def cut_common(checkpoint: Path) -> None:
    (checkpoint / "tensors" / "common.pt").write_bytes(b"")


def cut_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"format": 1, "st')


def write_noise(checkpoint: Path) -> None:
    (checkpoint / "ledger.json").write_bytes(b"\xff\xfe\x00")


def remove_ledger(checkpoint: Path) -> None:
    (checkpoint / "ledger.json").unlink()


def change_format(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"format": 99}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_tensors, "its tensors cannot be read"),
        (remove_tensors, "its tensors cannot be read"),
        (cut_metadata, "its tensors cannot be read"),
        (empty_metadata, "its tensors cannot be read"),
        (remove_tensor_folder, "its tensors cannot be read"),
        (cut_common, "its tensors cannot be read"),
        (cut_manifest, r"manifest\.json: damaged"),
        (write_noise, r"ledger\.json: damaged"),
        (remove_ledger, r"ledger\.json: there is no such file"),
        (change_format, "format 99, but this version reads 1"),
    ],
)
def test_a_damaged_checkpoint_is_one_error_that_names_it(
    saved: tuple[RunConfig, Path], damage: Callable[[Path], None], message: str
) -> None:
    config, folder = saved
    damage(folder / "step-00000002")
    with pytest.raises(CheckpointError, match=message) as caught:
        run_training(config)
    assert str(folder / "step-00000002") in str(caught.value)


def test_beside_a_damaged_checkpoint_the_older_one_can_be_named(saved: tuple[RunConfig, Path]) -> None:
    config, folder = saved
    cut_tensors(folder / "step-00000002")
    assert run_training(config, resume=folder / "step-00000001").finished  # what the message advises
    shutil.rmtree(folder / "step-00000001")
    assert run_training(config).finished  # and the damaged one was written anew


def wider(config: RunConfig) -> ModelSection:
    assert config.model.vision is not None
    assert config.model.language is not None
    return ModelSection(vision=config.model.vision, language=replace(config.model.language, ffn_hidden_size=48))


def test_a_checkpoint_of_another_model_is_refused_by_its_fields(saved: tuple[RunConfig, Path]) -> None:
    config, _ = saved
    with pytest.raises(CheckpointError, match=r"saved for another model \(language\.ffn_hidden_size differ\)"):
        run_training(replace(config, model=wider(config)))


def test_weights_of_another_model_are_refused_by_the_next_phase(saved: tuple[RunConfig, Path]) -> None:
    config, _ = saved
    following = replace(
        config, out=config.out.with_name("next"), model=wider(config), init=InitSection(checkpoint=config.out)
    )
    with pytest.raises(CheckpointError, match="step-00000002"):
        run_training(following)


def test_another_phase_does_not_go_on_in_the_folder_of_the_last(saved: tuple[RunConfig, Path]) -> None:
    config, _ = saved
    with pytest.raises(CheckpointError, match="saved by a run with phase=sft, but this one has warmup"):
        run_training(replace(config, phase="warmup", schedule=replace(config.schedule, steps=4)))


@dataclass(frozen=True)
class Point:
    """Something to make plain."""

    place: Path
    sizes: tuple[int, ...]


def test_configurations_become_plain_json_values() -> None:
    from mindvl_train.checkpoints import plain

    value = plain({"point": Point(Path("a/b"), (1, 2)), 3: [None, 1.5, "x"]})
    assert value == {"point": {"place": "a/b", "sizes": [1, 2]}, "3": [None, 1.5, "x"]}
    assert json.loads(json.dumps(value)) == value
