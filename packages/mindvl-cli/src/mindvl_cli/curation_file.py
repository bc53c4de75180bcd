# SPDX-License-Identifier: Apache-2.0
"""Read the file of a curation pipeline: the strict loader, and one registered dataclass for each step.

Comes before mindvl_data.curation. A step is written as `- step: NAME` with its parameters beside the name.
"""

import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mindvl_cli.failures import CliError
from mindvl_cli.load import load_config, load_section
from mindvl_cli.problems import ConfigError, Problem
from mindvl_data import DataError
from mindvl_data.curation.checks import check_libraries, check_steps
from mindvl_data.curation.config import CurationConfig, InputConfig, LimitsConfig, OutputConfig, StepConfig
from mindvl_data.curation.step import all_steps


@dataclass(frozen=True, kw_only=True)
class _CurationFile:
    """The file, with steps that are not yet read."""

    name: str
    seed: int = 0
    inputs: tuple[InputConfig, ...]
    steps: tuple[dict[str, Any], ...]
    out: Path
    output: OutputConfig = field(default_factory=OutputConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("inputs: is empty. Add at least one input with `path` and `format`.")
        if self.seed < 0:
            raise ValueError(f"seed: must be at least 0, got {self.seed}. Use for example 0.")


def load_curation(path: Path, overrides: Sequence[str] = (), out: Path | None = None) -> CurationConfig:
    """Read a pipeline.

    Args:
        path: YAML file.
        overrides: `KEY.PATH=VALUE` each, for example `steps.2.threshold=0.8`.
        out: Directory to use instead of the one in the file.

    Raises:
        ConfigError: Names every problem found, each with file and line.
    """
    document = load_config(path, _CurationFile, [*overrides, *([f"out={out}"] if out else [])])
    steps: list[StepConfig] = []
    problems: list[Problem] = []
    for index, entry in enumerate(document.steps):
        try:
            steps.append(_step(path, index, entry.get("step"), overrides))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    values = {one.name: getattr(document, one.name) for one in dataclasses.fields(document)}
    return CurationConfig(**{**values, "steps": tuple(steps)})


def check_curation(path: Path, config: CurationConfig, overrides: Sequence[str] = ()) -> None:
    """Check that every step finds the facts and libraries that it needs.

    Raises:
        CliError: Names file and line of the first step that does not.
    """
    try:
        check_steps(config)
        check_libraries(config)
    except DataError as error:
        found = re.match(r"steps\.(\d+): ", str(error))
        where = _line_of(path, int(found[1]), overrides) if found else str(path)
        raise CliError(f"{where}: {error}") from error


def _step(path: Path, index: int, name: Any, overrides: Sequence[str]) -> StepConfig:
    known = all_steps()
    if not isinstance(name, str) or name not in known:
        _refuse_name(path, index, name, list(known), overrides)
    config = known[name].config
    written = dataclasses.make_dataclass(
        config.__name__, [("step", Literal[name])], bases=(config,), frozen=True, kw_only=True
    )
    written.__doc__ = config.__doc__
    value: Any = load_section(path, f"steps.{index}", written, overrides)
    parameters = {one.name: getattr(value, one.name) for one in dataclasses.fields(config) if one.init}
    return StepConfig(step=name, parameters=config(**parameters))


def _refuse_name(path: Path, index: int, name: Any, known: list[str], overrides: Sequence[str]) -> None:
    """Raise the error for a step that does not exist, at its line."""
    where = _line_of(path, index, overrides)
    key = f"steps.{index}.step"
    if name is None:
        raise ConfigError([Problem(where, key, "is missing", "Add the name of a step.")])
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    to_do = f"Did you mean {near[0]!r}?" if near else "`mindvl data curate --explain` lists all steps."
    raise ConfigError([Problem(where, key, f"the step {name!r} does not exist", to_do)])


def _line_of(path: Path, index: int, overrides: Sequence[str]) -> str:
    """File and line of the name of a step."""
    try:
        load_section(path, f"steps.{index}", _AnyStep, overrides)
    except ConfigError as error:
        return error.problems[0].where
    return str(path)


@dataclass(frozen=True, kw_only=True)
class _AnyStep:
    """A step that no value matches, for the line of its name."""

    step: Literal[0]
