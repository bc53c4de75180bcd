# SPDX-License-Identifier: Apache-2.0
"""Read a recipe of one run, or a plan of several, with the words of the command line applied.

Comes after load.py; commands/train.py runs what this makes, and other commands that take a recipe ask here for one.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from mindvl_cli.failures import CliError
from mindvl_cli.load import load_config, top_keys

if TYPE_CHECKING:
    from mindvl_train import RunConfig
    from mindvl_train.phases import Stage


def is_pipeline(path: Path) -> bool:
    """Whether a file is a plan: it has stages, which no recipe has."""
    return "stages" in top_keys(path)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> "RunConfig":
    """One run.

    Raises:
        CliError: The file is a plan, or a recipe for merging.
        ConfigError: Names every problem of the recipe.
    """
    from mindvl_train import RunConfig

    refuse_pipeline(path)
    if "models" in top_keys(path):
        raise CliError(f"{path} is a recipe for merging models, not for training one. Use it by: mindvl merge {path}")
    return load_config(path, RunConfig, overrides)


def load_ready(path: Path, overrides: Sequence[str] = ()) -> "RunConfig":
    """The same, once every file and directory it names is known to be there.

    Raises:
        CliError: Names everything that is not.
    """
    from mindvl_train.dry_run import missing_paths

    config = load_recipe(path, overrides)
    missing = tuple(missing_paths(config))
    if missing:
        raise CliError(*missing)
    return config


def refuse_pipeline(path: Path) -> None:
    """For what works on one run.

    Raises:
        CliError: The file is a plan; names its recipes.
    """
    if is_pipeline(path):
        from mindvl_train.phases import PipelineConfig

        recipes = dict.fromkeys(str(path.parent / stage.recipe) for stage in load_config(path, PipelineConfig).stages)
        raise CliError(f"{path} is a plan of several runs; name one of its recipes: {', '.join(recipes)}.")


def load_stages(path: Path, overrides: Sequence[str] = ()) -> "list[Stage]":
    """The runs a file asks for, in order; a recipe asks for one.

    Args:
        overrides: KEY=VALUE; those of a plan's own keys change the plan, all others the recipe of every stage.

    Raises:
        CliError: The file, or one that a plan names, is a recipe for something else.
        ConfigError: Names every problem of the plan, or of the first recipe that has any.
    """
    from mindvl_train.phases import PipelineConfig, Stage

    if not is_pipeline(path):
        config = load_recipe(path, overrides)
        return [Stage(config.phase, None, config)]
    own = {field.name for field in fields(PipelineConfig)}
    for_plan = [text for text in overrides if text.partition("=")[0].partition(".")[0] in own]
    for_stages = [text for text in overrides if text not in for_plan]
    plan = load_config(path, PipelineConfig, for_plan)
    stages = []
    for stage in plan.stages:
        words = [*plan.overrides, *stage.overrides, *for_stages, *plan.place_of(stage)]
        config = load_recipe(path.parent / stage.recipe, words)
        stages.append(Stage(stage.name, stage.start_from, config))
    return stages
