# SPDX-License-Identifier: Apache-2.0
"""Tests of `mindvl convert`: refusals; what it writes is tested in mindvl-train and in tests/demo/test_pipeline.py."""

from pathlib import Path

from click.testing import CliRunner

from mindvl_cli.commands.convert import convert
from mindvl_train import CheckpointError


def test_a_folder_without_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    result = CliRunner().invoke(convert, [str(tmp_path), str(tmp_path / "model")])

    assert isinstance(result.exception, CheckpointError)
    assert str(tmp_path) in str(result.exception)
    assert not (tmp_path / "model").exists()
