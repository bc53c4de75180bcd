# SPDX-License-Identifier: Apache-2.0
"""A run continues from its newest intact checkpoint, and reports what is wrong with others."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mindvl_train import CheckpointConfig, CheckpointError, InitSection, ModelSection, RunConfig, run_training

pytestmark = pytest.mark.slow

TWO_STEPS: dict[str, Any] = {"steps": 2, "checkpoints": CheckpointConfig(every_steps=1, keep_last=5)}


@pytest.fixture(scope="module")
def original(config_for: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, both saved."""
    return run_training(config_for(tmp_path_factory.mktemp("original") / "run", **TWO_STEPS)).out


@pytest.fixture
def saved(original: Path, make_config: Callable[..., RunConfig]) -> tuple[RunConfig, Path]:
    """A copy of that run to damage; the directory of its checkpoints."""
    config = make_config(**TWO_STEPS)
    shutil.copytree(original, config.out)
    return config, config.out / "checkpoints"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def cut(name: str) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        (file,) = checkpoint.glob(name)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return damage


def remove(name: str) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        (path,) = checkpoint.glob(name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def turn_a_bit(name: str) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        (file,) = checkpoint.glob(name)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut("tensors/*.distcp"), r"tensors/__0_0\.distcp has \d+ bytes, but \d+ were written"),
        (remove("tensors/*.distcp"), r"tensors/__0_0\.distcp is missing"),
        (turn_a_bit("tensors/*.distcp"), r"its tensors cannot be read .*__0_0\.distcp: .* has a wrong checksum"),
        (turn_a_bit("tensors/.metadata"), r"tensors/\.metadata has a wrong checksum"),
        (cut("ledger.json"), r"ledger\.json has \d+ bytes"),
        (remove("tensors"), "is missing"),
        (cut("manifest.json"), r"manifest\.json: cannot be read"),
        (remove("manifest.json"), r"manifest\.json: file does not exist"),
        (remove("files.json"), r"files\.json is missing"),
        (cut("files.json"), r"files\.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_never_chosen_and_named(
    saved: tuple[RunConfig, Path], damage: Callable[[Path], None], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, directory = saved
    config = replace(config, schedule=replace(config.schedule, steps=3))
    damage(directory / "step-00000002")
    with pytest.raises(CheckpointError, match=message) as caught:  # named, it is an error
        run_training(config, resume=directory / "step-00000002")
    assert str(directory / "step-00000002") in str(caught.value)
    seen: list[int] = []
    run_training(config, on_step=lambda step, loss: seen.append(step))
    assert seen == [2, 3]  # from the older one, and the damaged one was written anew
    lines = [record.getMessage() for record in caplog.records if "DAMAGED" in record.getMessage()]
    assert len(lines) == 1
    assert re.search(message, lines[0])
    assert "Trying step-00000001" in lines[0]
    shutil.rmtree(directory / "step-00000003")
    assert run_training(config).finished


def test_a_disk_that_does_not_answer_is_no_damage(
    saved: tuple[RunConfig, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mindvl_train.megatron.tensor_files import TensorReader

    def stale(self: TensorReader, index: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    config, _ = saved
    config = replace(config, schedule=replace(config.schedule, steps=3))
    with monkeypatch.context() as patched:
        patched.setattr(TensorReader, "_load", stale)
        with pytest.raises(CheckpointError, match=r"step-00000002: I/O error while reading its tensors .*Start again"):
            run_training(config)
    assert "DAMAGED" not in caplog.text
    seen: list[int] = []
    run_training(config, on_step=lambda step, loss: seen.append(step))
    assert seen == [3]


def test_when_all_are_damaged_the_run_does_not_start_anew(saved: tuple[RunConfig, Path]) -> None:
    config, directory = saved
    for checkpoint in directory.iterdir():
        remove("ledger.json")(checkpoint)
    with pytest.raises(CheckpointError, match=r"step-00000001: ledger\.json is missing"):
        run_training(config)


def test_a_newer_format_is_not_taken_for_damage(saved: tuple[RunConfig, Path]) -> None:
    config, directory = saved
    (directory / "step-00000002" / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="format 99, but this version reads 2"):
        run_training(config)


def test_resuming_says_whether_numbers_stay_the_same(
    saved: tuple[RunConfig, Path], caplog: pytest.LogCaptureFixture
) -> None:
    config, directory = saved
    caplog.set_level("INFO")
    run_training(config, resume=directory / "step-00000001")
    assert "same parallel layout as step-00000001: the run continues bitwise identically" in caplog.text
    manifest = json.loads((directory / "step-00000002" / "manifest.json").read_text())
    manifest["run"]["parallel"]["tp_size"] = 2
    rewrite(directory / "step-00000002", manifest)
    run_training(replace(config, schedule=replace(config.schedule, steps=3)))
    assert (
        "the run continues with the same data order; results are equal up to rounding (tp_size 2 -> 1)" in caplog.text
    )


def test_no_step_draws_a_random_number(make_config: Callable[..., RunConfig]) -> None:
    states: list[torch.Tensor] = []
    run_training(make_config(steps=3), on_step=lambda step, loss: states.append(torch.get_rng_state()))
    assert all(torch.equal(state, states[0]) for state in states)


def rewrite(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """As if it had been saved so."""
    from mindvl_train.checkpoints.integrity import FILES, seal, write_json

    write_json(checkpoint / "manifest.json", manifest)
    (checkpoint / FILES).unlink()
    seal(checkpoint)


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


def test_another_phase_does_not_continue_in_the_directory_of_the_last(saved: tuple[RunConfig, Path]) -> None:
    config, _ = saved
    with pytest.raises(CheckpointError, match="saved by a run with phase=sft, but this run has phase=warmup"):
        run_training(replace(config, phase="warmup", schedule=replace(config.schedule, steps=4)))
