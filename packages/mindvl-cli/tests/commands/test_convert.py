# SPDX-License-Identifier: Apache-2.0
"""Tests of `mindvl convert`: refusals; what it writes is tested in mindvl-train and in tests/demo/test_pipeline.py."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from mindvl_cli.commands.convert import convert
from mindvl_train import CheckpointError


def test_a_folder_without_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    result = CliRunner().invoke(convert, [str(tmp_path), str(tmp_path / "model")])

    assert isinstance(result.exception, CheckpointError)
    assert str(tmp_path) in str(result.exception)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-pixels", "0"], "0 is not in the range"),
        (["--max-pixels", "-1"], "-1 is not in the range"),
        (["--min-pixels", "3136", "--max-pixels", "784"], "--min-pixels 3136 is above --max-pixels 784"),
    ],
)
def test_picture_sizes_that_no_picture_fits_are_wrong_usage(tmp_path: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(convert, [str(tmp_path), str(tmp_path / "model"), *options])

    assert result.exit_code == 2
    assert message in result.output
