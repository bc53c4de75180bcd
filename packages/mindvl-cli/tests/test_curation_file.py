# SPDX-License-Identifier: Apache-2.0
"""Tests of mindvl_cli.curation_file: strict loading of steps, with file and line in every problem."""

from pathlib import Path

import pytest

from mindvl_cli.curation_file import check_curation, load_curation
from mindvl_cli.failures import CliError
from mindvl_cli.problems import ConfigError
from mindvl_data.curation.config import InputConfig

GOOD = """\
name: pairs
inputs:
  - {path: raw.jsonl, format: jsonl}
steps:
  - step: exact_duplicates
    content: text
  - step: text_duplicates
out: curated
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "pairs.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_curation(path, overrides)
    return [str(problem).replace(str(path), "FILE") for problem in caught.value.problems]


def test_steps_become_their_dataclasses_and_overrides_apply(tmp_path: Path) -> None:
    config = load_curation(written(tmp_path, GOOD), ["steps.1.threshold=0.9", "seed=3"], tmp_path / "other")

    assert config.inputs == (InputConfig(path="raw.jsonl", format="jsonl"),)
    assert [step.step for step in config.steps] == ["exact_duplicates", "text_duplicates"]
    assert type(config.steps[0].parameters) is config.steps[0].definition.config
    assert config.steps[0].parameters.content == "text"
    assert config.steps[1].parameters.threshold == 0.9
    assert config.seed == 3
    assert config.out == tmp_path / "other"


def test_every_wrong_step_is_named_with_its_line(tmp_path: Path) -> None:
    text = GOOD.replace("content: text", "contents: text").replace("step: text_duplicates", "step: text_duplicate")
    first, second = problems(written(tmp_path, text))

    assert first == "FILE:6: steps.0.contents: is an unknown key. Did you mean 'content'?"
    assert second == "FILE:7: steps.1.step: the step 'text_duplicate' does not exist. Did you mean 'text_duplicates'?"


def test_a_wrong_value_is_named_with_its_line_or_as_an_override(tmp_path: Path) -> None:
    (wrong,) = problems(written(tmp_path, GOOD.replace("content: text", "memory_mib: 0")))
    assert wrong == "FILE:6: steps.0.memory_mib: must be at least 1, got 0."
    (wrong,) = problems(written(tmp_path, GOOD), "steps.0.content=3")
    assert wrong.startswith("command line: steps.0.content: 3 is not valid. Write one of 'media', ")


def test_a_step_without_a_name_and_a_file_without_inputs_are_refused(tmp_path: Path) -> None:
    (wrong,) = problems(written(tmp_path, GOOD.replace("step: exact_duplicates", "keep: pixels")))
    assert wrong == "FILE:5: steps.0.step: is missing. Add the name of a step."
    (wrong,) = problems(written(tmp_path, GOOD), "inputs=[]")
    assert wrong == "command line: inputs: is empty. Add at least one input with `path` and `format`."


def test_a_name_that_is_not_text_and_a_negative_seed_are_refused(tmp_path: Path) -> None:
    (wrong,) = problems(written(tmp_path, GOOD.replace("step: text_duplicates", "step: [text_duplicates]")))
    assert wrong == "FILE:7: steps.1.step: the step ['text_duplicates'] does not exist. Did you mean 'text_duplicates'?"
    (wrong,) = problems(written(tmp_path, GOOD), "seed=-1")
    assert wrong == "command line: seed: must be at least 0, got -1. Use for example 0."


def test_a_step_that_lacks_a_fact_is_named_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    check_curation(path, load_curation(path))
    path = written(tmp_path, GOOD.replace("step: text_duplicates", "step: render_rare"))
    with pytest.raises(CliError, match=r"pairs.yaml:7: steps.1: render_rare: needs 'rare_items'"):
        check_curation(path, load_curation(path))
