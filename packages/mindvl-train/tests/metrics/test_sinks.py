# SPDX-License-Identifier: Apache-2.0
"""Files of numbers survive kills and resumes."""

import importlib.util
import io
import json
import logging
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindvl_data import SourceConfig
from mindvl_train import MetricsConfig, RunConfig, TrainError
from mindvl_train.metrics.sinks import (
    JsonLines,
    Log,
    SwanLab,
    TensorBoard,
    flat,
    open_sinks,
    read_metrics,
    tensorboard_record,
)
from mindvl_train.validation.config import ValidationConfig

REPORT = {"step": 7, "loss": 1.5, "learning_rate": 1e-3, "grad_norm": 2.0, "tokens_per_s": 10.0}


def test_lines_after_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": float(step)}) + "\n" for step in range(1, 6)))
    sink = JsonLines(path, resumed_step=3)
    sink.write({"step": 4, "loss": 9.0})
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 1), (2, 2), (3, 3), (4, 9.0)]
    sink.close()
    JsonLines(path, resumed_step=0).close()
    assert read_metrics(path) == []


def test_a_last_line_cut_off_by_a_kill_is_left_out_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.1}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 0.1}]
    sink = JsonLines(path, resumed_step=2)
    sink.write({"step": 2, "loss": 0.2})
    sink.close()
    assert path.read_text() == '{"step": 1, "loss": 0.1}\n{"step": 2, "loss": 0.2}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_json_does_not_know_is_null_and_left_out_of_groups(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, resumed_step=0)
    sink.write({"step": 1, "grad_norm": float("nan"), "grad_norm_by_part": {"vision": float("inf"), "language": 2.0}})
    sink.close()
    assert path.read_text() == '{"step": 1, "grad_norm": null, "grad_norm_by_part": {"language": 2.0}}\n'


def test_tensorboard_gets_every_number_of_a_report(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path, resumed_step=0)
    sink.write(REPORT)
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(REPORT) - {"step"}
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(7, 1.5)]


def test_a_report_that_the_disk_does_not_take_whole_leaves_the_events_before_and_after_it(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path, resumed_step=0)
    sink.write(REPORT)
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            sink.write(REPORT | {"step": 8})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == before
    sink.write(REPORT | {"step": 9})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("loss")] == [7, 9]


@pytest.mark.parametrize("content", [b"", b"123456789", bytes(range(256)) * 5])
def test_a_record_equals_that_of_the_writer_of_tensorboard(content: bytes) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    file = io.BytesIO()
    RecordWriter(file).write(content)
    assert tensorboard_record(content) == file.getvalue()


def test_tensorboard_forgets_what_came_after_the_resumed_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed, steps in ((0, (1, 2, 3, 4)), (2, (3,))):
        sink = TensorBoard(tmp_path, resumed_step=resumed)
        for step in steps:
            sink.write(REPORT | {"step": step, "loss": float(10 * resumed + step)})
        sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 23.0)]


def test_the_log_gets_one_line_that_a_person_can_follow(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mindvl_train.metrics.sinks"):
        Log().write(REPORT)
    assert caplog.messages == ["step 7: loss 1.5000, lr 1.00e-03, grad norm 2.00, 10 tokens/s"]


def test_numbers_in_groups_get_the_names_of_their_groups(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report = REPORT | {"loss_by_source": {"pages": 2.5}, "routers": {"load": {"3": 1.5}}}
    assert flat({"step": 1, "since_last": {"step": 2}}) == {"since_last/step": 2}
    sink = TensorBoard(tmp_path, resumed_step=0)
    sink.write(report)
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {"loss_by_source/pages", "routers/load/3"} < set(events.Tags()["scalars"])
    assert [(event.step, event.value) for event in events.Scalars("loss_by_source/pages")] == [(7, 2.5)]


def test_the_log_also_tells_what_is_only_sometimes_there(caplog: pytest.LogCaptureFixture) -> None:
    split = {"vision": 1.0, "language": 5.0, "data_wait": 3.0, "host": 1.0}
    routers = {"load": {"3": 1.5, "4": 2.25}}
    with caplog.at_level(logging.INFO, logger="mindvl_train.metrics.sinks"):
        Log().write(REPORT | {"mfu": 0.4, "mtp_loss": {"1": 2.5}, "routers": routers, "step_split": split})
    assert caplog.messages[0].endswith(
        "10 tokens/s, MFU 40.0 %, MTP loss 2.500, busiest expert 2.25 times the mean, in layer 4, "
        "data wait 30 % of the step"
    )


@pytest.mark.parametrize("package", ["wandb", "swanlab"])
def test_asking_for_a_tracker_that_is_not_installed_names_the_field(
    make_config: Callable[..., RunConfig], package: str
) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    metrics = MetricsConfig(tensorboard=False, **{f"{package}_project": "vl"})
    config = make_config(metrics=metrics)
    config.out.mkdir()
    with pytest.raises(TrainError, match=rf"metrics\.{package}_project: is vl, but {package} is not installed"):
        open_sinks(config, 0)


# wandb itself needs an account and a network; this stands for the calls made to it, and for the same calls to swanlab.
WANDB = """
calls = []

class Run:
    def log(self, numbers, step):
        calls.append(("log", numbers, step))
    def finish(self):
        calls.append(("finish",))

def Table(columns, data):
    return columns, data

def init(**settings):
    calls.append(("init", settings))
    return Run()
"""


@pytest.mark.parametrize("package", ["wandb", "swanlab"])
def test_a_tracker_gets_every_number_under_one_id_per_directory(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    (tmp_path / "stand-in").mkdir()
    (tmp_path / "stand-in" / f"{package}.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(tmp_path / "stand-in"))
    monkeypatch.delitem(sys.modules, package, raising=False)
    metrics = MetricsConfig(tensorboard=False, **{f"{package}_project": "vl"})
    config = make_config(metrics=metrics)
    config.out.mkdir()
    for _ in range(2):
        for sink in open_sinks(config, 0):
            sink.write(REPORT | {"loss_by_source": {"pages": 2.5}})
            sink.close()
    calls = sys.modules[package].calls
    (_, first), (_, numbers, step), ended, (_, again), *_ = calls
    assert (first["project"], first["name"], first["resume"], step) == ("vl", "run", "allow", 7)
    assert first["id"] == again["id"]
    assert numbers == {name: value for name, value in REPORT.items() if name != "step"} | {"loss_by_source/pages": 2.5}
    assert ended == ("finish",)
    sys.modules.pop(package)


VALIDATION: dict[str, Any] = {
    "step": 7,
    "loss": 2.0,
    "loss_by_source": {"pages": 2.5},
    "token_accuracy": 0.5,
    "is_best": True,
    "generations": [{"name": "p:1", "prompt": "a\nb", "answer": "c", "expected": None, "num_tokens": 1}],
}


def test_a_validation_reaches_tensorboard_as_numbers_and_texts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path, resumed_step=0)
    sink.write_validation(VALIDATION)
    sink.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    tags = read.Tags()
    assert set(tags["scalars"]) == {
        "validation/loss", "validation/loss_by_source/pages", "validation/token_accuracy", "validation/is_best",
    }  # fmt: skip
    (text,) = tags["tensors"]
    assert read.SummaryMetadata(text).plugin_data.plugin_name == "text"
    shown = read.Tensors(text)[0].tensor_proto.string_val[0].decode()
    assert shown == "prompt:\n\n    a\n    b\n\nanswer:\n\n    c"


def test_a_validation_reaches_weights_and_biases_with_a_table(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stand-in").mkdir()
    (tmp_path / "stand-in" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(tmp_path / "stand-in"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    config = make_config(metrics=MetricsConfig(tensorboard=False, wandb_project="vl"))
    config.out.mkdir()
    for sink in open_sinks(config, 0):
        sink.write_validation(VALIDATION)
        sink.close()
    _, (_, values, step), _ = sys.modules["wandb"].calls
    assert step == 7
    assert values["validation/loss_by_source/pages"] == 2.5
    assert values["generations"] == (["name", "prompt", "answer", "expected"], [["p:1", "a\nb", "c", None]])
    sys.modules.pop("wandb")


def test_swanlab_keeps_numbers_and_answers_under_one_id_per_directory(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real package: its offline mode needs no account. It requires protobuf < 7, other than the pinned version."""
    pytest.importorskip("swanlab", reason="swanlab is not installed")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    config = make_config(metrics=MetricsConfig(tensorboard=False, swanlab_project="vl"))
    config.out.mkdir()
    for sink in open_sinks(config, 0):
        sink.write(REPORT | {"loss_by_source": {"pages": 2.5}})
        sink.write_validation(VALIDATION)
        sink.close()
    (record,) = (config.out / "swanlab").glob("run-*/run-*.swanlab")
    for name in (b"loss_by_source/pages", b"validation/loss", b"generations/p:1"):
        assert name in record.read_bytes()
    (answer,) = (config.out / "swanlab").glob("run-*/media/text/*")
    assert answer.read_text() == "prompt: a\nb\nanswer: c"
    again = SwanLab("vl", config.out)
    again.close()
    assert len({path.name for path in (config.out / "swanlab").glob("run-*/run-*.swanlab")}) == 1


def test_lines_of_validations_after_the_resumed_one_are_removed(
    make_config: Callable[..., RunConfig], held_out: tuple[SourceConfig, ...]
) -> None:
    config = make_config(
        metrics=MetricsConfig(every_steps=1, tensorboard=False), validation=ValidationConfig(sources=held_out)
    )
    config.out.mkdir()
    path = config.out / "validation.jsonl"
    for validated, kept in ((0, [7, 8]), (7, [7, 7, 8])):
        sinks = open_sinks(config, 8, validated)
        for step in (7, 8):
            for sink in sinks:
                sink.write_validation(VALIDATION | {"step": step})
        for sink in sinks:
            sink.close()
        assert [line["step"] for line in read_metrics(path)] == kept
    assert not (config.out / "metrics.jsonl").read_text()
