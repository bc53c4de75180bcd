# SPDX-License-Identifier: Apache-2.0
"""The example of the package README runs."""

import re
from pathlib import Path

import pytest

from mindvl_data import SourceConfig


@pytest.mark.slow
def test_the_readme_example_runs(
    sources: tuple[SourceConfig, ...], tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shards").symlink_to(sources[0].path)
    Path("tokenizer").symlink_to(tokenizer_directory)
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert (tmp_path / "model" / "model.safetensors").is_file()
