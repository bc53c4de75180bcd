# SPDX-License-Identifier: Apache-2.0
"""Tests of whole runs: counts by hand, the same bytes whatever runs them, restarts, and hostile records."""

import datetime
import importlib
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mindvl_data.curation.config import CurationConfig, InputConfig, LimitsConfig, OutputConfig, StepConfig
from mindvl_data.curation.coverage import TextCoverageConfig
from mindvl_data.curation.pipeline import curate, output_directory
from mindvl_data.errors import DataError
from mindvl_data.shards.claim import claimed

LISTS = ("dropped.jsonl", "quarantine.jsonl")
STEPS = Path(__file__).parent / "steps"
sys.path.insert(0, str(STEPS))
steps: Any = importlib.import_module("curation_test_steps")
LIMITS = LimitsConfig(seconds_per_record=60.0, memory_gib=1.0, batch_records=16)


def write_lines(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def pipeline(tmp_path: Path, *chosen: tuple[str, Any], out: str = "out", **fields: Any) -> CurationConfig:
    return CurationConfig(
        name="texts",
        inputs=(InputConfig(path=str(tmp_path / "in"), format="jsonl"),),
        steps=tuple(StepConfig(step=name, parameters=parameters) for name, parameters in chosen),
        out=tmp_path / out,
        **{"limits": LIMITS, "output": OutputConfig(samples_per_shard=40), **fields},
    )


def usual(tmp_path: Path, **fields: Any) -> CurationConfig:
    """Three parts of 40 texts; every tenth text is short, and every fourth occurs before."""
    for part in range(3):
        texts = [
            "x" if place % 10 == 9 else f"text {0 if place % 4 == 3 else 40 * part + place} of many"
            for place in range(40)
        ]
        if not (tmp_path / "in" / f"{part}.jsonl").exists():
            write_lines(tmp_path / "in" / f"{part}.jsonl", texts)
    chosen = [
        ("test_length", steps.Length(min_length=3)),
        ("test_unique", steps.Nothing()),
        ("test_length", steps.Length()),
    ]
    return pipeline(tmp_path, *chosen, **fields)


def output(out: Path) -> dict[str, bytes]:
    """Every file of a result that must not differ between two runs."""
    names = ["curation.json", "dropped.jsonl", "quarantine.jsonl"]
    files = [
        *(out / name for name in names),
        *sorted((out / "shards").glob("*.tar")),
        *sorted((out / "shards").glob("*.idx")),
    ]
    return {path.name: path.read_bytes() for path in files}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_counts_reasons_and_samples_are_those_of_the_input(tmp_path: Path) -> None:
    found = curate(usual(tmp_path))

    first, second, third = found.manifest["steps"]
    assert (first["in"], first["out"], first["dropped"]) == (120, 108, {"short": 12})
    # Of the places 3, 7, 11, ... of a part, 8 are not short; all 24 have the text of the very first record.
    assert (second["in"], second["out"], second["dropped"]) == (108, 84, {"duplicate": 24})
    assert (third["in"], third["out"]) == (84, 84)
    assert found.manifest["counts"] == {"read": 120, "written": 84, "quarantined": 0}
    dropped = lines(tmp_path / "out" / "dropped.jsonl")
    assert len(dropped) == 36
    assert dropped[0] == {**dropped[0], "id": "in/0.jsonl:10", "step": "test_length", "reason": "short", "value": 1}
    assert json.loads((tmp_path / "out" / "shards" / "manifest.json").read_bytes())["samples"] == 84


def test_facts_and_origin_are_written_into_the_sample(tmp_path: Path) -> None:
    curate(usual(tmp_path))

    content = (tmp_path / "out" / "shards" / "shard-000000.tar").read_bytes()
    sample = json.loads(content[512 : content.index(b"\0", 512)])
    assert sample["content"] == "text 0 of many"
    assert sample["source"] == "texts"
    assert sample["meta"]["origin"] == "in/0.jsonl:1"
    assert sample["meta"]["curation"]["length"] == 14


@pytest.mark.slow
def test_workers_and_batch_size_do_not_change_a_byte(tmp_path: Path) -> None:
    curate(usual(tmp_path))
    several = usual(tmp_path, out="several")
    curate(several, workers=2)
    small = usual(tmp_path, out="small", limits=LimitsConfig(seconds_per_record=60.0, memory_gib=1.0, batch_records=3))
    curate(small)

    expected = output(tmp_path / "out")
    assert output(tmp_path / "several") == expected
    found = output(tmp_path / "small")
    del found["curation.json"], expected["curation.json"]  # states the batch size
    assert found == expected


@pytest.mark.slow
def test_ray_on_a_cluster_of_several_processes_writes_the_same_bytes(tmp_path: Path) -> None:
    curate(usual(tmp_path))
    curate(usual(tmp_path, out="ray"), engine="ray", workers=2)

    assert output(tmp_path / "ray") == output(tmp_path / "out")


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_continues_to_the_same_bytes(tmp_path: Path) -> None:
    curate(usual(tmp_path))
    script = f"""
import sys; sys.path[:0] = [{str(STEPS)!r}, {str(Path(__file__).parent)!r}]
from pathlib import Path
import test_pipeline
test_pipeline.curate(test_pipeline.usual(Path({str(tmp_path)!r}), out="killed"), workers=2)
"""
    generator = random.Random(0)
    ends = 0
    while not (tmp_path / "killed" / "curation.json").exists():
        process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
        try:
            process.wait(timeout=generator.uniform(0.2, 1.0) + 0.6 * ends)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            ends += 1

    assert ends
    assert output(tmp_path / "killed") == output(tmp_path / "out")


@pytest.mark.slow
def test_finished_parts_are_not_computed_again_and_a_change_invalidates_what_follows_it(tmp_path: Path) -> None:
    good = usual(tmp_path)
    refusing = usual(tmp_path)
    object.__setattr__(
        refusing, "steps", (*good.steps[:2], StepConfig(step="test_length", parameters=steps.Length(refuses=True)))
    )
    with pytest.raises(DataError, match=r"^test_length: refuses to work\.$"):
        curate(refusing)
    (first,) = (tmp_path / "out" / "work").glob("segment-0-*")
    times = {path.name: path.stat().st_mtime_ns for path in first.iterdir()}
    second_before = {path.name for path in (tmp_path / "out" / "work").glob("segment-1-*")}
    assert len([name for name in times if name.endswith(".json")]) == 3

    with pytest.raises(DataError, match=r"refuses"):
        curate(refusing)
    assert {path.name: path.stat().st_mtime_ns for path in first.iterdir()} == times
    object.__setattr__(
        refusing, "steps", (*good.steps[:2], StepConfig(step="test_hostile", parameters=steps.Nothing()))
    )
    found = curate(refusing)

    assert found.manifest["counts"]["written"] == 84
    assert len(second_before) == 1
    assert not (tmp_path / "out" / "work").exists()


@pytest.mark.slow
def test_a_new_worker_applies_decisions_without_running_any_step(tmp_path: Path) -> None:
    config = usual(tmp_path)
    refusing = StepConfig(step="test_length", parameters=steps.Length(refuses=True))
    object.__setattr__(config, "steps", (*config.steps[:2], refusing))
    with pytest.raises(DataError, match="refuses"):
        curate(config)
    object.__setattr__(config, "steps", config.steps[:2])

    assert curate(config).manifest["counts"]["written"] == 84


def test_a_finished_run_is_not_repeated_and_another_configuration_is_refused(tmp_path: Path) -> None:
    before = curate(usual(tmp_path))
    again = curate(usual(tmp_path))
    assert again.was_finished
    assert again.manifest == before.manifest

    with pytest.raises(
        DataError, match=r"holds the result of another configuration.*Choose another directory with --out"
    ):
        curate(usual(tmp_path, seed=1))


@pytest.mark.slow
def test_records_that_end_a_worker_or_raise_are_quarantined_and_all_others_are_kept(tmp_path: Path) -> None:
    bad = {5: "abort", 30: "allocate", 42: "raise"}
    write_lines(tmp_path / "in" / "a.jsonl", [f"{bad.get(place, 'word')} {place}" for place in range(60)])
    with open(tmp_path / "in" / "a.jsonl", "a", encoding="utf-8") as file:
        file.write('{"text": \n')

    found = curate(pipeline(tmp_path, ("test_hostile", steps.Nothing())))

    reasons = {line["id"].rsplit(":", 1)[1]: line["reason"] for line in lines(tmp_path / "out" / "quarantine.jsonl")}
    assert sorted(map(int, reasons)) == [6, 31, 43, 61]
    assert reasons["6"] == "ended the worker process by SIGABRT"
    assert "Unable to allocate" in reasons["31"]
    assert reasons["43"] == "ValueError: the text says raise"
    assert found.manifest["counts"] == {"read": 61, "written": 57, "quarantined": 4}


@pytest.mark.slow
def test_a_worker_that_hangs_or_needs_too_much_memory_is_replaced(tmp_path: Path) -> None:
    bad = {5: "sleep", 10: "fill"}
    write_lines(tmp_path / "in" / "a.jsonl", [f"{bad.get(place, 'word')} {place}" for place in range(20)])
    limits = LimitsConfig(seconds_per_record=10.0, memory_gib=0.5, batch_records=8)

    found = curate(pipeline(tmp_path, ("test_hostile", steps.Nothing()), limits=limits))

    first, second = lines(tmp_path / "out" / "quarantine.jsonl")
    assert first == {**first, "id": "in/a.jsonl:6", "reason": "took more than 10 s (limits.seconds_per_record)"}
    assert second["id"] == "in/a.jsonl:11"
    assert second["reason"] == "needed more than 0.5 GiB of memory (limits.memory_gib)"
    assert found.manifest["counts"] == {"read": 20, "written": 18, "quarantined": 2}


def test_records_made_from_one_record_are_numbered_and_stay_in_order(tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", ["a b c", "d", "e a"])
    split = ("test_split", steps.Nothing())
    found = curate(pipeline(tmp_path, split, ("test_length", steps.Length()), ("test_unique", steps.Nothing())))

    assert [step["out"] for step in found.manifest["steps"]] == [6, 6, 5]
    (dropped,) = lines(tmp_path / "out" / "dropped.jsonl")
    assert dropped["value"] == "same as 0:0"  # the second "a" is piece 1 of record 2
    assert dropped["id"] == "in/a.jsonl:3"


@pytest.mark.slow
def test_a_sample_is_small_and_the_same_every_time(tmp_path: Path) -> None:
    config = usual(tmp_path)
    first = curate(config, sample=10)
    kept = output(first.out)
    second = curate(config, sample=10)

    assert first.out == tmp_path / "out-sample"
    assert first.manifest["counts"]["read"] == 10
    assert output(second.out) == kept
    assert not (tmp_path / "out" / "shards").exists()


def test_a_sample_leaves_the_lists_of_the_full_run_as_they_are(tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", [f"word{number}" for number in range(20)])
    config = pipeline(tmp_path, ("text_coverage", TextCoverageConfig()))
    curate(config)
    full = (tmp_path / "out" / "cache" / "coverage.json").read_text()
    curate(config, sample=2)

    assert (tmp_path / "out" / "cache" / "coverage.json").read_text() == full
    assert (tmp_path / "out-sample" / "cache" / "coverage.json").read_text() != full


def test_images_without_a_text_are_quarantined_by_name_when_no_step_writes_one(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (40, 30), "red" if name == "a" else "blue").save(tmp_path / "photos" / f"{name}.png")
    (tmp_path / "photos" / "a.txt").write_text("a red image", encoding="utf-8")
    inputs = (InputConfig(path=str(tmp_path / "photos"), format="imagefolder"),)
    shown: list[Any] = []
    found = curate(
        CurationConfig(name="p", inputs=inputs, steps=(), out=tmp_path / "out"),
        write_page=lambda tally, content: shown.append(tally),
    )

    assert found.manifest["counts"] == {"read": 2, "written": 1, "quarantined": 1}
    (line,) = lines(tmp_path / "out" / "quarantine.jsonl")
    assert line["id"] == "photos/b.png"
    assert "`content` has no text" in line["reason"]
    (example,) = shown[0]["examples"]["kept"]
    assert example["image"]
    assert example["text"] == "a red image"


@pytest.mark.slow
def test_a_run_without_any_sample_left_writes_its_lists(tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", ["a", "b"])
    found = curate(pipeline(tmp_path, ("test_length", steps.Length(min_length=5))))

    assert found.manifest["counts"]["written"] == 0
    assert len(lines(tmp_path / "out" / "dropped.jsonl")) == 2


@pytest.mark.slow
def test_shards_that_an_interrupted_run_left_are_not_mixed_with_those_of_a_changed_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    expected = curate(usual(tmp_path, out="expected", output=OutputConfig(samples_per_shard=20)))
    with monkeypatch.context() as patch:
        patch.setattr("mindvl_data.curation.pipeline.index_shards", interrupt)
        write_lines(tmp_path / "in" / "0.jsonl", [f"an earlier text {place}" for place in range(120)])
        other = usual(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            curate(other)
    assert len(list((tmp_path / "out" / "shards").glob("*.tar"))) == 5

    (tmp_path / "in" / "0.jsonl").unlink()
    found = curate(usual(tmp_path, output=OutputConfig(samples_per_shard=20)))

    assert found.manifest["counts"] == expected.manifest["counts"]
    shards = [
        {path.name: path.read_bytes() for path in (one.out / "shards").glob("*.tar")} for one in (found, expected)
    ]
    assert shards[0] == shards[1]


@pytest.mark.slow
def test_lists_are_in_input_order_whatever_the_batches_are(tmp_path: Path) -> None:
    texts = ["a b", "x", "raise", "long enough", "y", "raise it", "", "z z"]
    write_lines(tmp_path / "in" / "a.jsonl", texts)
    with open(tmp_path / "in" / "a.jsonl", "a", encoding="utf-8") as file:
        file.write("not json\n" + json.dumps({"text": "b"}) + "\n")
    chosen = [("test_length", steps.Length(min_length=2)), ("test_hostile", steps.Nothing())]
    chosen.append(("test_length", steps.Length(min_length=5)))
    for size in (1, 3, 16):
        limits = LimitsConfig(seconds_per_record=60.0, memory_gib=1.0, batch_records=size)
        out = curate(pipeline(tmp_path, *chosen, out=f"out-{size}", limits=limits)).out
        rows = {name: [line["id"].partition(":")[2] for line in lines(out / name)] for name in LISTS}
        assert rows == {"dropped.jsonl": ["1", "2", "5", "7", "8", "10"], "quarantine.jsonl": ["3", "6", "9"]}


def test_a_directory_work_of_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    config = usual(tmp_path)
    (tmp_path / "out" / "work" / "thesis").mkdir(parents=True)

    with pytest.raises(DataError, match="out/work/thesis: is not a file of a curation run"):
        curate(config)
    assert (tmp_path / "out" / "work" / "thesis").is_dir()


@pytest.mark.slow
def test_the_lock_is_held_until_only_it_is_left_and_then_the_directory_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is deleted while it is open stays on NFS, so that its directory could not be removed."""
    left: list[set[str]] = []
    released = os.close

    def close(descriptor: int) -> None:
        work = tmp_path / "out" / "work"
        if (tmp_path / "out" / "curation.json").exists() and work.is_dir():
            left.append({path.name for path in work.iterdir()})
        released(descriptor)

    monkeypatch.setattr("mindvl_data.shards.claim.os.close", close)
    curate(usual(tmp_path))

    assert left[-1] == set()  # unlinked by the lock itself, while the directory still exists
    assert not (tmp_path / "out" / "work").exists()


def test_a_sample_that_another_process_writes_is_not_removed(tmp_path: Path) -> None:
    work = tmp_path / "out-sample" / "work"
    work.mkdir(parents=True)

    with claimed(work), pytest.raises(DataError, match="is writing"):
        curate(usual(tmp_path), sample=5)
    assert work.is_dir()


def test_a_sample_of_a_run_in_the_current_directory_is_written_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    config = usual(tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    assert output_directory(replace(config, out=Path(".")), 5) == tmp_path / "here-sample"


@pytest.mark.slow
def test_a_table_with_dates_in_its_messages_does_not_stop_the_run(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": "hi", "sent": datetime.date(2020, 1, 1)}]
    pq.write_table(pa.table({"messages": [messages] * 3}), tmp_path / "a.parquet")
    inputs = (InputConfig(path=str(tmp_path / "a.parquet"), format="parquet"),)

    found = curate(replace(usual(tmp_path), inputs=inputs))

    assert found.manifest["counts"] == {"read": 3, "written": 0, "quarantined": 3}
    assert "a value of type date cannot be stored" in lines(tmp_path / "out" / "quarantine.jsonl")[0]["reason"]
