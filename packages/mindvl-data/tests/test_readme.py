# SPDX-License-Identifier: Apache-2.0
"""The examples in the README run as they stand, one after another."""

import re
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_the_examples_run(
    tokenizer_directory: Path,
    tiny_qwen2_5_vl: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(examples) == 5
    (tmp_path / "tokenizer").symlink_to(tokenizer_directory)
    tiny_qwen2_5_vl.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("[0, ")
    assert "'000000001'" in printed
    moved = [parameter for parameter in names["model"].parameters() if names["optimizer"].state[parameter]]
    assert len(moved) == len(list(names["model"].parameters()))
