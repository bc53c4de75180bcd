# SPDX-License-Identifier: Apache-2.0
"""Read what `mindvl train` is given: one recipe, or a plan of several, with the words of the command line applied.

Comes after load.py; commands/train.py runs what this makes.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from mindvl_cli.load import load_config, top_keys

if TYPE_CHECKING:
    from mindvl_train.phases import Stage


def is_plan(path: Path) -> bool:
    """Whether a file is a plan: it has stages, which no recipe has."""
    return "stages" in top_keys(path)


def load_stages(path: Path, overrides: Sequence[str] = ()) -> "list[Stage]":
    """The runs a file asks for, in order; a recipe asks for one.

    Args:
        overrides: KEY=VALUE; those of a plan's own keys change the plan, all others the recipe of every stage.

    Raises:
        ConfigError: Names every problem of the plan, or of the first recipe that has any.
    """
    from mindvl_train import RunConfig
    from mindvl_train.phases import PlanConfig, Stage

    if not is_plan(path):
        config = load_config(path, RunConfig, overrides)
        return [Stage(config.phase, None, config)]
    own = {field.name for field in fields(PlanConfig)}
    for_plan = [text for text in overrides if text.partition("=")[0].partition(".")[0] in own]
    for_stages = [text for text in overrides if text not in for_plan]
    plan = load_config(path, PlanConfig, for_plan)
    stages = []
    for stage in plan.stages:
        words = [*plan.overrides, *stage.overrides, *for_stages, *plan.place_of(stage)]
        config = load_config(path.parent / stage.recipe, RunConfig, words)
        stages.append(Stage(stage.name, stage.start_from, config))
    return stages
