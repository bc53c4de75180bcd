# SPDX-License-Identifier: Apache-2.0
"""Figures of a run come from its files alone, whatever state it is in."""

import json
from pathlib import Path
from typing import Any

import pytest

from mindvl_cli.failures import CliError
from mindvl_cli.run_figures import SPLIT_PARTS, mean_split, read_run, run_figures, splits, state_of


def line(step: int, **more: Any) -> dict[str, Any]:
    """What every version reports."""
    return {
        "step": step,
        "loss": 4.0 / step,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "loss_tokens": 10 * step,
        "tokens": 100 * step,
        "tokens_per_s": 50.0 * step,
        "seconds_per_step": 2.0,
        **more,
    }


def since(samples: int, sample_tokens: int) -> dict[str, Any]:
    counts = {"steps": 1, "packs": 2, "samples": samples, "sample_tokens": sample_tokens, "visual_tokens": 7}
    return {"since_last": {**counts, "loss_tokens": 10, "tokens": 128, "tflop": 1.5}}


def write(directory: Path, lines: list[dict[str, Any]]) -> Path:
    (directory / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return directory


def test_means_are_over_all_samples_and_speed_leaves_out_the_first_report(tmp_path: Path) -> None:
    write(tmp_path, [line(1, **since(10, 90)), line(2, **since(20, 120)), line(4, **since(10, 110))])
    (tmp_path / "run.json").write_text(json.dumps({"data": {"seq_length": 64, "sources": []}}))
    figures = run_figures(read_run(tmp_path))
    assert (figures["samples"], figures["average_tokens_per_sample"]) == (40, 8.0)
    assert figures["packing_efficiency"] == pytest.approx(320 / (6 * 64))
    assert figures["tokens_per_s"] == 150.0  # of 100 and 200
    assert (figures["loss"], figures["tokens"], figures["tflop"]) == (1.0, 400, 4.5)
    assert figures["mfu"] is None


def test_speed_is_that_of_the_last_start_whose_layout_the_card_tells(tmp_path: Path) -> None:
    write(tmp_path, [line(step) for step in range(1, 8)])
    for start_step, expected in ((0, 50 * 4.5), (4, 50 * 6.5), (6, 50 * 7), (7, 50 * 4)):
        (tmp_path / "run.json").write_text(json.dumps({"start_step": start_step}))
        assert run_figures(read_run(tmp_path))["tokens_per_s"] == expected


def test_the_loss_is_the_last_that_was_learned(tmp_path: Path) -> None:
    write(tmp_path, [line(1), line(2, loss=None)])
    assert run_figures(read_run(tmp_path))["loss"] == 4.0
    write(tmp_path, [line(1, loss=None)])
    assert run_figures(read_run(tmp_path))["loss"] is None


def test_a_run_is_finished_or_stopped_by_its_result_and_unfinished_without_or_with_an_older_one(tmp_path: Path) -> None:
    write(tmp_path, [line(1), line(2)])
    assert state_of(read_run(tmp_path)) == "unfinished"
    for step, finished, state in ((2, True, "finished"), (2, False, "stopped"), (1, False, "unfinished")):
        (tmp_path / "result.json").write_text(json.dumps({"step": step, "finished": finished}))
        assert state_of(read_run(tmp_path)) == state


def test_the_gain_is_how_much_faster_steps_were_without_a_part() -> None:
    split = dict.fromkeys(SPLIT_PARTS, 0.0) | {"vision": 1.0, "language": 2.0, "data_wait": 1.0}
    parts = mean_split(splits([line(1, step_split=split), line(2)], {}))
    assert parts["data_wait"] == {"seconds": 1.0, "share": 0.25, "gain_if_zero": pytest.approx(1 / 3)}
    assert parts["host"]["gain_if_zero"] == 0
    assert sum(part["share"] for part in parts.values()) == 1
    assert mean_split(splits([line(1)], {})) == {}


def test_one_process_waits_for_no_other_and_sends_nothing() -> None:
    split = dict.fromkeys(SPLIT_PARTS, 0.0) | {"vision": 1.0, "host": 0.5, "exposed_communication": 0.25}
    (alone,) = splits([line(1, step_split=split)], {"hardware": {"count": 1}})
    assert alone == {"vision": 1.0, "language": 0.0, "optimizer": 0.0, "host": 0.75, "data_wait": 0.0}
    assert splits([line(1, step_split=split)], {"hardware": {"count": 2}}) == [split]


def test_sources_are_those_asked_for_and_those_that_came(tmp_path: Path) -> None:
    write(tmp_path, [line(1, tokens_by_source={"a": 30}), line(2, tokens_by_source={"a": 30, "b": 40})])
    asked = [{"name": "a", "share_asked": 0.5}, {"name": "c", "share_asked": 0.5}]
    (tmp_path / "run.json").write_text(json.dumps({"data": {"sources": asked}}))
    sources = run_figures(read_run(tmp_path))["sources"]
    assert [(one["name"], one["share_asked"], one["share_of_tokens"]) for one in sources] == [
        ("a", 0.5, 0.6),
        ("b", None, 0.4),
        ("c", 0.5, 0.0),
    ]


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, [line(1), line(2)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [one["step"] for one in read_run(tmp_path).lines] == [1, 2]


@pytest.mark.parametrize(("text", "message"), [(None, "no metrics.jsonl"), ("", "is empty"), ('{"st', "is empty")])
def test_a_directory_without_reports_is_refused_with_what_to_do(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(CliError, match=message):
        read_run(tmp_path)


def test_a_damaged_card_is_named(tmp_path: Path) -> None:
    write(tmp_path, [line(1)])
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(CliError, match=r"run\.json"):
        read_run(tmp_path)
