# SPDX-License-Identifier: Apache-2.0
"""Whole runs: phases train what they name, stop when asked, refuse what cannot continue."""

import gc
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mindvl_data import DataError, Loader, index_directory
from mindvl_data.ledger import TrainingRecords, read_skipped, verify
from mindvl_train import (
    CheckpointConfig,
    CheckpointError,
    InitSection,
    MetricsConfig,
    ModelSection,
    RunConfig,
    TrainError,
    run_training,
)
from mindvl_train.config import FaultsConfig
from mindvl_train.faults.anomalous_steps import AnomalousSteps

pytestmark = pytest.mark.slow

Read = Callable[[Path], dict[str, torch.Tensor]]


def weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}


def test_a_run_learns_and_reports_what_it_used(
    make_config: Callable[..., RunConfig], read_losses: Callable[[RunConfig], list[tuple[int, float, float]]]
) -> None:
    reported: list[tuple[int, float | None]] = []
    config = make_config(steps=20, metrics=MetricsConfig(every_steps=5, tensorboard=True))
    result = run_training(config, on_step=lambda step, loss: reported.append((step, loss)))
    assert result.finished
    losses = read_losses(config)
    assert [step for step, _, _ in losses] == [3, 5, 6, 9, 10, 12, 15, 18, 20]  # reports, and before every checkpoint
    assert losses[-1][1] < losses[0][1] - 0.1
    assert [step for step, _ in reported] == list(range(1, 21))
    assert [(step, loss) for step, loss in reported if loss is not None] == [(step, loss) for step, loss, _ in losses]
    assert set(result.data["samples_by_source"]) == {"pages", "photos", "text"}
    assert [path.name for path in sorted((config.out / "checkpoints").iterdir())] == ["step-00000018", "step-00000020"]
    assert list((config.out / "tensorboard").iterdir())


def test_a_run_that_has_ended_leaves_no_model_behind(make_config: Callable[..., RunConfig]) -> None:
    """The phases of a plan run in one process: the next one needs the memory."""

    def alive() -> int:
        gc.collect()
        return sum(type(found).__name__ == "MindVLModel" for found in gc.get_objects())

    before = alive()
    run_training(make_config("first", steps=1))
    assert alive() == before


def test_warm_up_changes_the_projector_only_and_sft_changes_every_part(
    make_config: Callable[..., RunConfig], read_tensors: Read
) -> None:
    started = make_config("started", steps=1)
    # A learning rate of zero writes the very start.
    frozen = replace(started, schedule=replace(started.schedule, peak_lr=0.0, min_lr=0.0))
    before = weights(read_tensors(run_training(frozen).checkpoint))
    for phase, changed in (("warmup", {"projector"}), ("sft", {"vision", "projector", "language"})):
        config = make_config(phase, steps=2, phase=phase)
        after = weights(read_tensors(run_training(config).checkpoint))
        assert before.keys() == after.keys()
        moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
        assert {name.split(".")[0] for name in moved} == changed
        assert all(name in moved for name in before if name.startswith("projector"))


def test_the_next_phase_starts_from_the_weights_of_the_last(
    make_config: Callable[..., RunConfig], read_tensors: Read
) -> None:
    first = run_training(make_config("warmup", steps=2, phase="warmup"))
    config = make_config("next", steps=1, init=InitSection(checkpoint=first.out), seed=99)
    still = replace(config, schedule=replace(config.schedule, peak_lr=0.0, min_lr=0.0))
    second = run_training(still)
    expected, actual = (weights(read_tensors(result.checkpoint)) for result in (first, second))
    assert expected.keys() == actual.keys()
    assert all(torch.equal(tensor, actual[name]) for name, tensor in expected.items())


def test_sigterm_saves_and_the_run_continues_later(
    make_config: Callable[..., RunConfig], read_tensors: Read, read_losses: Callable[[RunConfig], object]
) -> None:
    straight = run_training(make_config("straight"))
    config = make_config("stopped")
    before = signal.getsignal(signal.SIGTERM)

    def stop(step: int, loss: float | None) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = run_training(config, on_step=stop)
    assert (stopped.step, stopped.finished, stopped.checkpoint.name) == (2, False, "step-00000002")
    assert signal.getsignal(signal.SIGTERM) is before
    resumed = run_training(config)
    assert (resumed.step, resumed.finished) == (6, True)
    expected, actual = read_tensors(straight.checkpoint), read_tensors(resumed.checkpoint)
    assert all(torch.equal(tensor, actual[name]) for name, tensor in expected.items())
    assert read_losses(make_config("straight")) == read_losses(config)
    again = run_training(config)  # nothing left to do
    assert (again.step, again.finished, again.checkpoint) == (6, True, resumed.checkpoint)


def test_a_signal_in_the_last_step_ends_a_finished_run_that_says_so(make_config: Callable[..., RunConfig]) -> None:
    def stop(step: int, loss: float | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    result = run_training(make_config(steps=1), on_step=stop)
    assert (result.finished, result.asked_to_stop) == (True, True)


def test_never_refuses_a_directory_that_holds_a_checkpoint(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(steps=1)
    run_training(config, resume="never")
    with pytest.raises(TrainError, match="already has checkpoint step-00000001"):
        run_training(config, resume="never")


def test_a_path_resumes_another_run_in_a_new_directory(
    make_config: Callable[..., RunConfig], read_tensors: Read
) -> None:
    straight = run_training(make_config("straight"))
    branch = make_config("branch")
    result = run_training(branch, resume=straight.out / "checkpoints" / "step-00000003")
    expected, actual = read_tensors(straight.checkpoint), read_tensors(result.checkpoint)
    assert all(torch.equal(tensor, actual[name]) for name, tensor in expected.items())
    with pytest.raises(CheckpointError, match="contains no complete checkpoint"):
        run_training(branch, resume=branch.out.with_name("nowhere"))


def test_going_back_to_an_older_checkpoint_starts_a_new_branch_that_lasts(
    make_config: Callable[..., RunConfig], read_losses: Callable[[RunConfig], list[tuple[int, float, float]]]
) -> None:
    config = make_config()
    run_training(config)

    def stop(step: int, loss: float | None) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    back = run_training(config, resume=config.out / "checkpoints" / "step-00000003", on_step=stop)
    assert back.checkpoint.is_dir()
    assert back.checkpoint.name == "step-00000005"
    seen: list[int] = []
    run_training(config, on_step=lambda step, loss: seen.append(step))
    assert seen == [6]  # from the new branch, not from the end of the old one
    assert [step for step, _, _ in read_losses(config)] == [1, 2, 3, 4, 5, 6]


def ledger_of(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "ledger.json").read_text())
    return state


def test_the_ledger_of_a_run_that_stopped_and_went_on_is_what_was_planned(
    make_config: Callable[..., RunConfig],
) -> None:
    config = make_config(steps=5)

    def stop(step: int, loss: float | None) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    run_training(config, on_step=stop)
    result = run_training(config)
    log = config.out / "audit.jsonl"
    report = verify(config.data, log, global_batch_size=2, state=ledger_of(result.checkpoint))
    assert report["verified"]["problems"] == []
    assert (report["steps"], report["checkpoint_step"], report["verified"]["steps"]) == (5, 5, 5)


def test_changed_data_are_refused_until_somebody_accepts_them(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config()
    photos = config.data.sources[1]
    shutil.copytree(photos.path, tmp_path / "photos")
    sources = tuple(replace(s, path=tmp_path / "photos") if s is photos else s for s in config.data.sources)
    config = replace(config, data=replace(config.data, sources=sources))

    def stop(step: int, loss: float | None) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    run_training(config, on_step=stop)
    for file in [*(tmp_path / "photos").glob("shard-000001.*"), tmp_path / "photos" / "manifest.json"]:
        file.unlink()
    index_directory(tmp_path / "photos")
    with pytest.raises(DataError, match=r"step-00000002/ledger\.json: index of photos changed since it was written"):
        run_training(config)
    result = run_training(config, accept_data_change="me@here")
    assert result.finished
    state = ledger_of(result.checkpoint)
    assert [(c["step"], c["who"], list(c["sources"])) for c in state["changes"]] == [(2, "me@here", ["photos"])]
    report = verify(config.data, config.out / "audit.jsonl", global_batch_size=2, state=state)
    assert report["verified"]["problems"] == []


def test_used_up_data_is_saved_and_the_run_continues_once_max_epochs_is_raised(
    make_config: Callable[..., RunConfig],
) -> None:
    config = make_config(steps=500, max_epochs=1, checkpoints=CheckpointConfig())
    result = run_training(config)
    assert (result.data_used_up, result.finished, result.step < 500) == (True, False, True)
    assert result.checkpoint.name == f"step-{result.step:08d}"
    assert result.checkpoint.is_dir()
    state = ledger_of(result.checkpoint)
    assert state["order"]["totals"]["samples"] == 24 + 24 + 20
    again = run_training(config)  # nothing to do, and nothing changed
    assert (again.data_used_up, again.checkpoint) == (True, result.checkpoint)

    sources = tuple(replace(source, max_epochs=2) for source in config.data.sources)
    more = replace(config, data=replace(config.data, sources=sources))
    with pytest.raises(DataError, match=r"max_epochs=1 -> .*max_epochs=2.*--accept-data-change"):
        run_training(more)
    continued = run_training(more, accept_data_change="me@here")
    assert (continued.data_used_up, continued.step > result.step) == (True, True)
    assert ledger_of(continued.checkpoint)["order"]["totals"]["samples"] == 2 * (24 + 24 + 20)
    log = config.out / "audit.jsonl"
    report = verify(more.data, log, global_batch_size=2, state=ledger_of(continued.checkpoint))
    assert report["verified"]["problems"] == []
    shorter = replace(config, schedule=replace(config.schedule, steps=continued.step), data=more.data)
    assert run_training(shorter).finished


def test_the_account_of_a_run_says_what_was_trained_on_and_what_was_skipped(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnomalousSteps, "_anomaly", lambda steps, *_: "a reason" if steps._state.step >= 10 else None)
    config = make_config(steps=14, checkpoints=CheckpointConfig(), faults=FaultsConfig(on_anomalous_step="skip"))
    photos = config.data.sources[1]
    shutil.copytree(photos.path, tmp_path / "photos")
    shard = bytearray((tmp_path / "photos" / "shard-000000.tar").read_bytes())
    for found in re.finditer(b"\x89PNG", bytes(shard)):
        shard[found.start() : found.start() + 40] = bytes(40)
    (tmp_path / "photos" / "shard-000000.tar").write_bytes(shard)
    sources = tuple(replace(s, path=tmp_path / "photos") if s is photos else s for s in config.data.sources)
    config = replace(config, data=replace(config.data, sources=sources, max_failed_share=1.0))

    def stop(step: int, loss: float | None) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    run_training(config, on_step=stop)
    with (config.out / "quarantine.rank00000.jsonl").open("a") as file:  # of a try that was killed after the save
        for step in (8, 9):
            bad = {
                "step": step,
                "source": "photos",
                "shard": "shard-000001.tar",
                "sample_index": 1,
                "key": "k",
                "reason": "r",
            }
            file.write(json.dumps(bad) + "\n")
    result = run_training(config)

    manifest = json.loads((result.checkpoint / "manifest.json").read_text())
    training = TrainingRecords(
        skipped=read_skipped(config.out / "skipped.jsonl"),
        **{f"num_{name}": manifest[name] for name in ("skipped", "placeholders")},
    )
    records: dict[str, Any] = {"state": ledger_of(result.checkpoint), "quarantine_log": config.out / "quarantine.jsonl"}
    log = config.out / "audit.jsonl"
    report = verify(config.data, log, global_batch_size=2, training=training, **records)
    assert report["verified"]["problems"] == []
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    in_step = {line["step"]: sum(map(len, line["packs"])) for line in lines}
    anomalous = sum(in_step[step] for step in (11, 12, 13, 14))
    unusable = sum(
        use[0] == "photos" and use[2] == "shard-000000.tar"
        for line in lines[:10]
        for pack in line["packs"]
        for use in pack
    )
    assert unusable
    assert report["skipped"] == {
        "in anomalous steps": anomalous, "failed to decode": unusable, "masked on this rank": 0
    }  # fmt: skip
    assert report["trained_on"] == sum(in_step.values()) - anomalous - unusable
    assert report["verified"]["samples"] == report["samples"] == sum(in_step.values())
    (config.out / "quarantine.rank00000.jsonl").unlink()
    nothing = replace(training, skipped={})
    found = verify(config.data, log, global_batch_size=2, training=nothing, **records)["verified"]["problems"]
    assert any("counts 4 skipped steps, skipped.jsonl lists 0" in problem for problem in found)
    assert any("placeholders, the quarantine logs list 0" in problem for problem in found)


def test_a_run_without_a_step_to_do_saves_what_it_resumed_from_another_directory(
    make_config: Callable[..., RunConfig],
) -> None:
    done = run_training(make_config("done", steps=2))
    result = run_training(make_config("copy", steps=2), resume=done.checkpoint)
    assert (result.finished, result.checkpoint.is_dir(), result.checkpoint.parts[-3]) == (True, True, "copy")


def test_a_signal_during_a_save_ends_the_run_with_that_save(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindvl_train.checkpoints import saving

    saves: list[int] = []

    def save(saver: saving.Saver, state: Any, save: Any = saving.Saver.save) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        saves.append(state.step)
        path: Path = save(saver, state)
        return path

    monkeypatch.setattr(saving.Saver, "save", save)
    result = run_training(make_config())
    assert (saves, result.step, result.finished, result.asked_to_stop) == ([3], 3, False, True)


def test_a_second_start_in_one_directory_is_refused_before_it_changes_anything(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindvl_train import claim

    monkeypatch.setattr(claim, "_TIMEOUT_S", 0.0)
    config = make_config(steps=2)
    run_training(config)
    shutil.rmtree(config.out / "checkpoints")  # as before the first checkpoint

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in config.out.rglob("*") if path.is_file()}

    with claim.claimed(config.out):  # the first run
        before = files()
        with pytest.raises(TrainError, match=rf"is locked by another run \(process {os.getpid()} on .*`out`"):
            run_training(config)
        assert files() == before
    assert run_training(config).finished  # the claim has ended


def test_a_published_qwen2_5_vl_is_trained_on_and_exported_as_one(
    make_config: Callable[..., RunConfig], read_tensors: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions of three axes come from the loader because the model says so; the weights go there and back."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    from mindvl_model.testing.tiny import save_qwen2_5_vl, smallest_qwen2_5_vl
    from mindvl_train import loading
    from mindvl_train.checkpoints.export import export_checkpoint

    asked: list[str] = []

    class Watched(Loader):
        def __init__(self, *arguments: Any, position_kind: Any, **options: Any) -> None:
            asked.append(position_kind)
            super().__init__(*arguments, position_kind=position_kind, **options)

    monkeypatch.setattr(loading, "Loader", Watched)
    published = save_qwen2_5_vl(smallest_qwen2_5_vl(vocab_size=264), tmp_path / "published")
    sections = {
        "model": ModelSection(directory=tmp_path / "published"),
        "init": InitSection(model=tmp_path / "published"),
    }
    config = make_config("qwen", steps=2, **sections)
    result = run_training(config)
    assert (result.step, asked) == (2, ["mrope"])
    assert not torch.equal(
        read_tensors(result.checkpoint)["language.output_layer.weight"], published.lm_head.weight.detach()
    )
    still = replace(config, out=tmp_path / "still", schedule=replace(config.schedule, peak_lr=0.0, min_lr=0.0))
    run_training(still)
    export_checkpoint(still.out, tmp_path / "exported")
    back = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "exported")
    expected = published.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in back.state_dict().items())
