# SPDX-License-Identifier: Apache-2.0
"""An old recipe key, option or format is refused with its new name."""

import dataclasses
import typing
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindvl_cli.commands.data import data
from mindvl_cli.failures import run_guarded
from mindvl_cli.load import ConfigError, load_config, load_section
from mindvl_cli.main import cli
from mindvl_cli.renamed import KEYS, OPTIONS
from mindvl_data import DataConfig
from mindvl_train import RunConfig
from mindvl_train.config import FaultsConfig

RECIPE = "phase: sft\nout: run\nmodel: {folder: model}\npacks_per_step: 1\ndata:\n  max_bad_share: 0.5\n"


def _has(cls: type, key_path: str) -> bool:
    name, _, below = key_path.partition(".")
    if name not in {field.name for field in dataclasses.fields(cls)}:
        return False
    return not below or _has(typing.get_type_hints(cls)[name], below)


@pytest.mark.parametrize(("old", "new"), KEYS.items())
def test_every_new_key_exists_and_no_old_one_does(old: str, new: str) -> None:
    assert _has(RunConfig, new)
    assert not _has(RunConfig, old)


def test_every_old_key_of_a_recipe_is_refused_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    with pytest.raises(ConfigError) as caught:
        load_config(path, RunConfig, ["faults.on_bad_step=skip"])
    assert str(caught.value).splitlines() == [
        f"{path}:4: packs_per_step: was renamed. Use global_batch_size.",
        f"{path}:6: data.max_bad_share: was renamed. Use data.max_failed_share.",
        "command line: faults.on_bad_step: was renamed. Use faults.on_anomalous_step.",
        f"{path}:3: model.folder: was renamed. Use model.directory.",
    ]


def test_a_section_names_its_own_old_keys_only(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    with pytest.raises(ConfigError, match=r"^\S+:6: data\.max_bad_share: was renamed\. Use data\.max_failed_share\.$"):
        load_section(path, "data", DataConfig)
    with pytest.raises(ConfigError, match=r"^\S+:4: packs_per_step: was renamed"):
        load_section(path, "global_batch_size", int)


def test_an_old_key_in_the_manifest_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text('{"run": {"packs_per_step": 1}}')
    with pytest.raises(ConfigError, match=r"run\.packs_per_step: was renamed\. Use global_batch_size\.$"):
        load_section(path, "run.global_batch_size", int)


def test_an_old_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for old, new in OPTIONS.items():
        words = ["plan", "mindvl-8b", old, "4"]
        assert run_guarded(lambda words=words: cli.main(words, prog_name="mindvl", standalone_mode=False)) == 2
        assert f"Error: {old}: was renamed. Use {new}." in capsys.readouterr().err


def test_an_old_format_is_refused() -> None:
    result = CliRunner().invoke(data, ["write", "photos", "--format", "folder", "--out", "shards"])
    assert result.exit_code == 2
    assert "'folder' was renamed. Use 'imagefolder'." in result.stderr


def test_an_error_of_a_section_is_reported_at_the_line_of_its_field(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("on_anomalous_step: skip\nstuck_after_s: -1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, FaultsConfig)
    expected = f"{path}:2: stuck_after_s: must be between 0 (no limit) and 1e7 seconds, got -1"
    assert str(caught.value).startswith(expected)
