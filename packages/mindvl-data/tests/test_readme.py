# SPDX-License-Identifier: Apache-2.0
"""The example in the README runs as it stands."""

import re
from pathlib import Path

import pytest


def test_the_example_runs(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "tokenizer").symlink_to(tokenizer_folder)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("[0, ")
    assert "'000000001'" in printed
