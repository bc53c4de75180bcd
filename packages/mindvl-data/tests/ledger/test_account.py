# SPDX-License-Identifier: Apache-2.0
"""Seeded mutations of every record of a run: the verdict stays the same, or one sentence names what is wrong."""

import gzip
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindvl_data import DataConfig, DataError, Loader, log_parts
from mindvl_data.audit_lines import read_log
from mindvl_data.ledger import TrainingRecords, read_skipped, verify

MakeConfig = Callable[..., DataConfig]
Records = tuple[DataConfig, Path]

STEPS = 20
NUM_MUTATIONS = int(os.environ.get("MINDVL_LEDGER_MUTATIONS", "40"))
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**70,
    1e300,
    -0.5,
    "",
    "x",
    "audit.jsonl",
    [],
    {},
    [[]],
    [None],
    [1, "a"],
]
FILES = r"ledger\.json|audit\S*jsonl|skipped\.jsonl|quarantine\S*jsonl"


@pytest.fixture
def records(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Records:
    """A run of several parts with a skipped step and two placeholders, saved at its end."""
    monkeypatch.setattr(log_parts, "PART_BYTES", 1500)
    run = tmp_path / "run"
    config = make_config(audit_log=run / "audit.jsonl", num_threads=0)
    with Loader(config, global_batch_size=2, position_kind="rope") as loader:
        for _ in range(2 * STEPS):
            next(loader)
        (run / "ledger.json").write_text(json.dumps(loader.state_dict()))
    line = json.loads((run / "audit.jsonl").read_text().splitlines()[-1])
    fourth = next(line for line in read_log(run / "audit.jsonl") if line.step == 4 and line.kind == "packs")
    ranks = [{"rank": 0, "packs": [[[*use, "key"] for use in pack] for pack in fourth.packs]}]
    skipped = {"step": 4, "action": "skipped", "why": "the loss is nan", "ranks": ranks}
    (run / "skipped.jsonl").write_text(json.dumps(skipped) + "\n")
    names = ("source", "epoch", "shard", "sample_index")
    uses = [dict(zip(names, use, strict=True)) for use in (line["packs"][0][0], line["packs"][1][0])]
    bad = [json.dumps({"step": line["step"], **use, "key": "k", "reason": "no JPEG"}) + "\n" for use in uses]
    (run / "quarantine.rank00000.jsonl").write_text("".join(bad))
    return config, run


def judge(config: DataConfig, run: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The figures without times, and every message."""
    try:
        state = json.loads((run / "ledger.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return None, [f"ledger.json: {error}"]  # the command says so
    try:
        training = TrainingRecords(
            skipped=read_skipped(run / "skipped.jsonl"), step=STEPS, num_skipped=1, num_placeholders=2
        )
        figures = verify(
            config,
            run / "audit.jsonl",
            global_batch_size=2,
            state=state,
            quarantine_log=run / "quarantine.jsonl",
            training=training,
            num_processes=1,
        )
    except DataError as error:
        return None, [str(error)]
    problems: list[str] = figures["verified"]["problems"]
    return figures, problems


def mutate(choose: random.Random, path: Path) -> str:
    """Change one file in one of the ways in which files are damaged or forged."""
    packed = path.suffix == ".gz"
    content = bytearray(gzip.decompress(path.read_bytes()) if packed else path.read_bytes())
    lines = bytes(content).splitlines(keepends=True)
    kind = choose.choice(["byte", "cut", "delete", "line", "twice", "swap", "value", "value", "value", "raw", "noise"])
    if kind == "delete":
        path.unlink()
        return kind
    if kind == "raw":  # the file as it is on disk
        stored = bytearray(path.read_bytes())
        stored[choose.randrange(len(stored))] ^= 1 << choose.randrange(8)
        path.write_bytes(bytes(stored))
        return kind
    if kind == "byte":
        content[choose.randrange(len(content))] = choose.randrange(256)
    elif kind == "cut":
        del content[choose.randrange(len(content)) :]
    elif kind == "noise":
        place = choose.randrange(len(content))
        content[place:place] = choose.choice([b"\0", b"\xff\xfe", b"[" * 50_000, b"9" * 5000, b"\n", b'{"step":1}'])
    else:
        number = choose.randrange(len(lines))
        if kind == "line":
            del lines[number]
        elif kind == "twice":
            lines.insert(number, lines[number])
        elif kind == "swap":
            other = choose.randrange(len(lines))
            lines[number], lines[other] = lines[other], lines[number]
        else:
            lines[number] = with_value(choose, lines[number], path.name == "ledger.json")
        content = bytearray(b"".join(lines))
    path.write_bytes(gzip.compress(bytes(content)) if packed else bytes(content))
    return kind


def with_value(choose: random.Random, line: bytes, is_state: bool) -> bytes:
    """The same line with another value somewhere, and with a right checksum if it is a ledger state."""
    import hashlib

    document = json.loads(line)
    at: Any = document
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return line
        key = choose.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and choose.random() < 0.8:
            at = at[key]
            continue
        at[key] = choose.choice([*VALUES, at[key] + 1 if isinstance(at[key], int) else None])
        break
    if is_state and isinstance(document, dict):
        body = {name: value for name, value in document.items() if name != "checksum"}
        document = {**body, "checksum": hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]}
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


@pytest.mark.slow
def test_a_damaged_record_is_never_a_traceback_and_never_another_verdict(records: Records, tmp_path: Path) -> None:
    config, run = records
    quiet, messages = judge(config, run)
    assert messages == []
    assert quiet is not None
    assert quiet["skipped"]["failed to decode"] == 2
    whole = tmp_path / "whole"
    shutil.copytree(run, whole)
    choose = random.Random(int(os.environ.get("MINDVL_LEDGER_SEED", "0")))
    different = 0
    for number in range(NUM_MUTATIONS):
        shutil.rmtree(run)
        shutil.copytree(whole, run)
        path = choose.choice(sorted(path for path in run.iterdir() if path.is_file()))
        kind = mutate(choose, path)
        what = f"{number}: {kind} of {path.name}"
        figures, messages = judge(config, run)
        different += bool(messages)
        if messages:
            assert all("\n" not in text and len(text) < 1500 for text in messages), what
            assert any(re.search(rf"{FILES}|^step|^steps|^epoch|checkpoint|ledger state", text) for text in messages), (
                messages
            )
        else:
            same = {name: value for name, value in quiet.items() if name not in ("began", "ended", "failed_samples")}
            left = {name: value for name, value in (figures or {}).items() if name in same}
            assert without_bad(left) == without_bad(same), what
    assert different > NUM_MUTATIONS // 2


def without_bad(figures: dict[str, Any]) -> dict[str, Any]:
    """The wording of causes may differ: a reason is free text."""
    sources = {
        name: {k: v for k, v in one.items() if k != "failed_samples"} for name, one in figures["sources"].items()
    }
    return figures | {"sources": sources, "skipped": sum(figures["skipped"].values())}
