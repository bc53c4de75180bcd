# SPDX-License-Identifier: Apache-2.0
"""Read the recipe of one run, or a pipeline file with several training stages, with overrides applied.

Comes after load.py; used by commands/train.py and by other commands that take a recipe.
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
    """Whether a file is a pipeline file: it has the key `stages`, which no recipe has."""
    return "stages" in top_keys(path)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> "RunConfig":
    """Read the recipe of one run.

    Raises:
        CliError: The file is a pipeline file, or a merge recipe.
        ConfigError: Names every problem of the recipe.
    """
    from mindvl_train import RunConfig

    refuse_pipeline(path)
    if "models" in top_keys(path):
        raise CliError(f"{path}: is a merge recipe, not a training recipe. Run: mindvl merge {path}.")
    return load_config(path, RunConfig, overrides)


def load_ready(path: Path, overrides: Sequence[str] = ()) -> "RunConfig":
    """Read the recipe of one run and check that every file and directory in it exists.

    Raises:
        CliError: Names every missing path.
    """
    from mindvl_train.dry_run import missing_paths

    config = load_recipe(path, overrides)
    missing = tuple(missing_paths(config))
    if missing:
        raise CliError(*missing)
    return config


def refuse_pipeline(path: Path) -> None:
    """Refuse a pipeline file where one recipe is needed.

    Raises:
        CliError: The file is a pipeline file; the message names its recipes.
    """
    if is_pipeline(path):
        from mindvl_train.phases import PipelineConfig

        recipes = dict.fromkeys(str(path.parent / stage.recipe) for stage in load_config(path, PipelineConfig).stages)
        raise CliError(f"{path}: is a pipeline file, not a recipe. Name one of its recipes: {', '.join(recipes)}.")


def load_stages(path: Path, overrides: Sequence[str] = ()) -> "list[Stage]":
    """Read the training stages of a pipeline file in order, or the one stage of a recipe.

    Args:
        overrides: KEY=VALUE; keys of the pipeline file override it, all others the recipe of every stage.

    Raises:
        CliError: The file, or a recipe of the pipeline, is of another kind.
        ConfigError: Names every problem of the pipeline file, or of the first recipe with one.
    """
    from mindvl_train import TrainError
    from mindvl_train.phases import PipelineConfig, Stage, check_best

    if not is_pipeline(path):
        config = load_recipe(path, overrides)
        return [Stage(config.phase, None, config)]
    own = {field.name for field in fields(PipelineConfig)}
    for_pipeline = [text for text in overrides if text.partition("=")[0].partition(".")[0] in own]
    for_stages = [text for text in overrides if text not in for_pipeline]
    pipeline = load_config(path, PipelineConfig, for_pipeline)
    stages = []
    for stage in pipeline.stages:
        words = [*pipeline.overrides, *stage.overrides, *for_stages, *pipeline.path_overrides(stage)]
        config = load_recipe(path.parent / stage.recipe, words)
        stages.append(Stage(stage.name, stage.start_from, config))
    try:
        check_best(stages)
    except TrainError as error:
        raise CliError(f"{path}: {error}") from error
    return stages
