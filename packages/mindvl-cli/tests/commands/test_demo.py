# SPDX-License-Identifier: Apache-2.0
"""Tests of `mindvl demo`'s own part: directories; the pipeline is tested in tests/demo/test_pipeline.py."""

from pathlib import Path

from click.testing import CliRunner

from mindvl_cli.commands.demo import demo
from mindvl_cli.failures import CliError


def test_a_directory_of_somebody_else_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("three years")

    result = CliRunner().invoke(demo, ["--quick", "--fresh", "--out", str(tmp_path)])

    assert isinstance(result.exception, CliError)
    assert (tmp_path / "thesis.txt").is_file()
