# SPDX-License-Identifier: Apache-2.0
"""Tests of `mindvl train`: how a recipe is refused; tests/demo/test_pipeline.py sees it train."""

import getpass
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindvl_cli.commands.train import train
from mindvl_cli.load import ConfigError

RECIPE = """
phase: sft
out: {out}
model: {{size: tiny}}
data:
  sources: [{{name: pages, path: shards}}]
  tokenizer: tokenizer
  packing: {{seq_length: 1024}}
schedule: {{steps: 5, peak_lr: 1.0e-3}}
packs_per_step: 1
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(out=tmp_path / "run"))
    return path


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("schedule.stepz=5", "steps"),
        ("schedule.steps=0", "steps=0"),
        ("schedule.steps=many", "schedule.steps"),
        ("model.size=huge", "huge"),
        ("data.image.patch_size=16", "patch_size"),
        ("phase=sleep", "warmup"),
    ],
)
def test_a_wrong_value_is_refused_by_name_before_anything_is_made(recipe: Path, override: str, said: str) -> None:
    result = CliRunner().invoke(train, [str(recipe), override])

    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
    assert not (recipe.parent / "run").exists()


def test_a_run_without_its_data_says_which_folder_is_missing(recipe: Path) -> None:
    result = CliRunner().invoke(train, [str(recipe)])

    assert result.exception is not None
    assert "tokenizer" in str(result.exception)


@pytest.mark.parametrize(("words", "who"), [([], False), (["--accept-data-change"], True)])
def test_changed_data_are_accepted_by_user_and_host_only_when_asked(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], who: bool
) -> None:
    import mindvl_train

    given: dict[str, object] = {}

    def stop_here(config: object, **options: object) -> None:
        given.update(options)
        raise SystemExit(3)

    monkeypatch.setattr(mindvl_train, "run_training", stop_here)
    assert CliRunner().invoke(train, [str(recipe), *words]).exit_code == 3
    assert given["accept_data_change"] == (f"{getpass.getuser()}@{socket.gethostname()}" if who else None)
