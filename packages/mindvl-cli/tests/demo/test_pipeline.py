# SPDX-License-Identifier: Apache-2.0
"""Tests of the whole demo at the smallest size: the stages in order, resumed, and the same twice."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindvl_cli.demo.outcome import gather
from mindvl_cli.demo.pipeline import DemoRun, run_demo
from mindvl_cli.demo.report import report_document
from mindvl_cli.demo.settings import QUICK, DemoSettings
from mindvl_cli.demo.stages import StageBook

pytestmark = pytest.mark.slow

SMALLEST: DemoSettings = replace(
    QUICK,
    vision=replace(QUICK.vision, hidden_size=48, num_layers=1, num_heads=3, full_attention_layers=(0,)),
    language=replace(QUICK.language, num_layers=1),
    sources={name: replace(source, num_samples=120) for name, source in QUICK.sources.items()},
    vision_backbone=replace(QUICK.vision_backbone, num_images=40, steps=2, batch_size=16),
    language_backbone=replace(QUICK.language_backbone, steps=2),
    warmup=replace(QUICK.warmup, steps=2),
    multitask=replace(QUICK.multitask, steps=2),
    sft=tuple(replace(phase, steps=2, num_processes=1) for phase in QUICK.sft),
    validation_items=2,
    test_items=2,
    headline_items=2,
)


def _demo_run(out: Path) -> DemoRun:
    return DemoRun(out=out, settings=SMALLEST, seed=5, book=StageBook(out, "test"))


def _document(out: Path) -> dict[str, Any]:
    work = _demo_run(out)
    document = report_document(gather(work, run_demo(work), is_quick=True), out)
    return {key: value for key, value in document.items() if key not in ("timing", "machine")}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("first")
    return out, _document(out)


def test_every_stage_leaves_its_part_of_the_report(first: tuple[Path, dict[str, Any]]) -> None:
    out, document = first

    assert [row["model"] for row in document["table"]["rows"]] == ["sft-256", "sft-512", "sft-1024", "merged"]
    assert len(document["search"]["models"]) == 4
    assert {example["task"] for example in document["examples"]} == {
        task["name"] for task in document["table"]["tasks"]
    }
    trained = {stage["name"] for stage in document["stages"] if stage["curve"]}
    assert {"backbone-vision", "backbone-language", "warmup", "multitask", "sft-256", "sft-512", "sft-1024"} == trained
    commands = "\n".join(stage["command"] for stage in document["stages"])
    for command in ("data write", "data index", "train", "convert", "merge", "search-resolution", "eval"):
        assert f"mindvl {command} " in commands
    assert str(out) not in json.dumps(document)  # nothing of the machine


def test_a_run_that_was_cut_off_continues_and_ends_with_the_same_figures(
    first: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("mindvl_cli.demo.pipeline.merge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            _document(tmp_path)

    assert _document(tmp_path) == first[1]
