# SPDX-License-Identifier: Apache-2.0
"""Turn a published recipe and the user's shard directories into the sources of a mixture.

Comes after load.py; its SourceConfigs go to the planner. Weights are the paper's sample counts, so that dropping a
source leaves the proportions of the others as they are.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from mindvl_data import DataError, SourceConfig
from mindvl_data.recipes.types import Recipe, RecipeSource, RecipeTable


def map_recipe(
    recipe: Recipe, mapping: Mapping[str, Path | str], *, renormalize: bool = False
) -> tuple[tuple[SourceConfig, ...], list[str]]:
    """The sources that have a directory, weighted by samples, and the names of those that have none.

    Args:
        mapping: Name in the paper -> directory of indexed shards, or its address in an object store.
        renormalize: Go on without the missing sources; the rest keep their relative shares.

    Raises:
        DataError: A name is unknown, a directory does not exist, a source has no count, none is mapped, or, unless
            `renormalize`, one is missing.
    """
    _check_names(recipe, mapping)
    for name, directory in mapping.items():
        if "://" not in str(directory) and not Path(directory).is_dir():
            raise DataError(
                f"{name!r} has the directory {str(directory)!r}, which does not exist. mapping. Correct its path."
            )
    missing = [source.name for source in recipe.sources if source.name not in mapping]
    if missing and not renormalize:
        raise DataError(
            f"{len(missing)} of {len(recipe.sources)} sources have no directory: {', '.join(missing)}. "
            f"recipe {recipe.name}. Map them, or go on without them (renormalize)."
        )
    if not mapping:
        raise DataError(f"no source has a directory. recipe {recipe.name}. Map one of its sources at least.")
    mapped = [source for source in recipe.sources if source.name in mapping]
    return tuple(
        SourceConfig(name=source.name, path=mapping[source.name], weight=_count(recipe, source)) for source in mapped
    ), missing


def find_directories(recipe: Recipe, root: Path) -> dict[str, Path]:
    """The mapping of the sources whose directory (`RecipeSource.directory`) lies below `root`; others are left out.

    Raises:
        DataError: `root` is no directory, or holds none of them.
    """
    found = {source.name: root / source.directory for source in recipe.sources if (root / source.directory).is_dir()}
    if not found:
        example = recipe.sources[0]
        raise DataError(
            f"no directory of a source is here. {root}, recipe {recipe.name}. "
            f"Name directories after their source, such as {example.directory!r} for {example.name!r}, or give a mapping."
        )
    return found


def with_samples(recipe: Recipe, counts: Mapping[str, int]) -> Recipe:
    """The recipe with the user's count for some sources, such as one for which the paper prints none.

    Raises:
        DataError: A name is unknown or a count is not positive.
    """
    _check_names(recipe, counts)
    for name, count in counts.items():
        if count < 1:
            raise DataError(f"{count} samples of {name!r} cannot be weighed. recipe {recipe.name}. Use 1 or more.")

    def counted(table: RecipeTable) -> RecipeTable:
        sources = tuple(replace(s, samples=counts.get(s.name, s.samples)) for s in table.sources)
        return replace(table, sources=sources)

    return replace(recipe, tables=tuple(counted(table) for table in recipe.tables))


def _check_names(recipe: Recipe, names: Iterable[str]) -> None:
    known = [source.name for source in recipe.sources]
    lower = {name.lower(): name for name in known}  # of names that differ in case, the nearest is the one meant
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.0)[0]
            raise DataError(f"{name!r} is no source. recipe {recipe.name}. Did you mean {lower[near]!r}?")


def _count(recipe: Recipe, source: RecipeSource) -> int:
    if source.samples is None:
        raise DataError(
            f"the paper prints no sample count for {source.name!r}. recipe {recipe.name}. Say how many samples to "
            f"weigh it by, or leave it out."
        )
    return source.samples
