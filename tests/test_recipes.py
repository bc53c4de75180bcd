# SPDX-License-Identifier: Apache-2.0
"""Every recipe loads: unknown keys, wrong types and values that do not fit together are found before a run."""

import json
from pathlib import Path

import pytest

from mindvl_cli.load import load_config, to_plain

RECIPES = Path(__file__).parents[1] / "recipes"
FILES = sorted(RECIPES.rglob("*.yaml"))


def _config_class(path: Path) -> type:
    if path.stem.startswith("merge"):
        from mindvl_merge import MergeConfig

        return MergeConfig
    from mindvl_train import RunConfig

    return RunConfig


def test_there_are_recipes_for_every_phase() -> None:
    assert {"warmup", "multitask", "sft"} <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(RECIPES).as_posix())
def test_every_recipe_loads_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    config: object = load_config(path, _config_class(path))
    again = tmp_path / "again.yaml"
    again.write_text(json.dumps(to_plain(config)), encoding="utf-8")  # JSON is YAML

    assert load_config(again, _config_class(path)) == config
