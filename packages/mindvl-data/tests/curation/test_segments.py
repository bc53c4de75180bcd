# SPDX-License-Identifier: Apache-2.0
"""Tests of mindvl_data.curation.segments."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindvl_data.curation.config import CurationConfig, InputConfig, StepConfig
from mindvl_data.curation.engine.parts import InputFiles, Part
from mindvl_data.curation.engine.tasks import Segment
from mindvl_data.curation.model_scores import ClipScore
from mindvl_data.curation.segments import cut_segments, plain

sys.path.insert(0, str(Path(__file__).parent / "steps"))
steps: Any = importlib.import_module("curation_test_steps")
WORK = Path("work")


def cut(*lengths: int, seed: int = 0, size: int = 5) -> tuple[list[Segment], str]:
    """test_length, test_unique, test_length, test_unique, ... with one length for each test_length."""
    chosen: list[StepConfig] = []
    for length in lengths:
        chosen.append(StepConfig(step="test_length", parameters=steps.Length(min_length=length)))
        chosen.append(StepConfig(step="test_unique", parameters=steps.Nothing()))
    inputs = (InputConfig(path="in", format="jsonl"),)
    config = CurationConfig(name="x", seed=seed, inputs=inputs, steps=tuple(chosen), out=Path("out"))
    files = [InputFiles(files=1, num_bytes=size, digest="d")]
    return cut_segments(config, WORK, [Part(number=0, input=0, files=("in",))], files, "1.0")


def test_a_pipeline_is_cut_after_each_set_step() -> None:
    first, second, last = cut(1, 2)[0]

    assert [index for index, _, _ in first.steps] == [0]
    assert first.signed is not None
    assert first.signed[:2] == (1, "test_unique")
    assert (first.source, first.decisions, first.applied) == (None, None, None)
    assert second.applied == (1, "test_unique")
    assert second.source == first.directory
    assert [index for index, _, _ in second.steps] == [2]
    assert last.applied == (3, "test_unique")
    assert last.steps == ()
    assert last.signed is None


def test_a_changed_parameter_gives_other_directories_from_its_segment_on() -> None:
    before, digest = cut(1, 2)
    after, other_digest = cut(1, 3)

    assert after[0].directory == before[0].directory
    assert after[1].directory != before[1].directory
    assert after[2].directory != before[2].directory
    assert digest != other_digest


def test_seed_and_inputs_change_every_directory() -> None:
    before = {segment.directory for segment in cut(1, 2)[0]}
    assert not before & {segment.directory for segment in cut(1, 2, seed=1)[0]}
    assert not before & {segment.directory for segment in cut(1, 2, size=6)[0]}


def test_a_configuration_becomes_json_values() -> None:
    @dataclass(frozen=True)
    class Inner:
        path: Path
        names: frozenset[str]

    assert plain({"a": (Inner(Path("x/y"), frozenset({"b", "a"})), None)}) == {
        "a": [{"path": "x/y", "names": ["a", "b"]}, None]
    }


def test_another_model_in_the_same_directory_changes_the_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    step = StepConfig(step="clip_similarity", parameters=ClipScore(model=tmp_path))
    inputs = (InputConfig(path="in", format="jsonl"),)
    config = CurationConfig(name="x", inputs=inputs, steps=(step,), out=Path("out"))

    def digest() -> str:
        return cut_segments(config, WORK, [], [InputFiles(files=1, num_bytes=5, digest="d")], "1.0")[1]

    before = digest()
    assert digest() == before
    (tmp_path / "model.safetensors").write_bytes(b"12")
    assert digest() != before
