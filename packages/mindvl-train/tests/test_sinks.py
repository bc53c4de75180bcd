# SPDX-License-Identifier: Apache-2.0
"""Files of numbers survive kills and resumes."""

import json
import logging
from pathlib import Path

import pytest

from mindvl_train.sinks import JsonLines, Log, TensorBoard, read_metrics

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


def test_tensorboard_gets_every_number_of_a_report(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path, resumed_step=0)
    sink.write(REPORT)
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(REPORT) - {"step"}
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(7, 1.5)]


def test_the_log_gets_one_line_that_a_person_can_follow(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mindvl_train.sinks"):
        Log().write(REPORT)
    assert caplog.messages == ["step 7: loss 1.5000, lr 1.00e-03, grad norm 2.00, 10 tokens/s"]
