# SPDX-License-Identifier: Apache-2.0
"""Map the sources of a published mixture to directories of shards.

Comes after load.py; the data order uses the resulting SourceConfigs. Weights are the sample counts of the paper, so that
removing a source does not change the proportions of the others.
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
        recipe: The mixture.
        mapping: Name in the paper -> directory of indexed shards, or its address in an object store.
        renormalize: Leave out the missing sources; the others keep their relative shares.

    Raises:
        DataError: A name is unknown, a directory does not exist, a source has no sample count, none is mapped, or one is
            missing and `renormalize` is False.
    """
    _check_names(recipe, mapping)
    for name, directory in mapping.items():
        if "://" not in str(directory) and not Path(directory).is_dir():
            raise DataError(f"mapping: the directory {str(directory)!r} of {name!r} does not exist. Correct its path.")
    missing = [source.name for source in recipe.sources if source.name not in mapping]
    if missing and not renormalize:
        raise DataError(
            f"mixture {recipe.name}: {len(missing)} of {len(recipe.sources)} sources have no directory: "
            f"{', '.join(missing)}. Map them, or leave them out (renormalize)."
        )
    if not mapping:
        raise DataError(f"mixture {recipe.name}: no source has a directory. Map at least one of its sources.")
    mapped = [source for source in recipe.sources if source.name in mapping]
    return tuple(
        SourceConfig(name=source.name, path=mapping[source.name], weight=_count(recipe, source)) for source in mapped
    ), missing


def find_directories(recipe: Recipe, root: Path) -> dict[str, Path]:
    """Map the sources whose directory (`RecipeSource.directory`) exists in `root`; others are left out.

    Raises:
        DataError: `root` is not a directory, or has none of them.
    """
    found = {source.name: root / source.directory for source in recipe.sources if (root / source.directory).is_dir()}
    if not found:
        example = recipe.sources[0]
        raise DataError(
            f"{root}: the directory has no source of mixture {recipe.name}. Name directories after their source, such as "
            f"{example.directory!r} for {example.name!r}, or specify a mapping."
        )
    return found


def with_samples(recipe: Recipe, counts: Mapping[str, int]) -> Recipe:
    """Replace the sample counts of some sources, for example of one for which the paper prints none.

    Raises:
        DataError: A name is unknown or a count is not positive.
    """
    _check_names(recipe, counts)
    for name, count in counts.items():
        if count < 1:
            raise DataError(
                f"mixture {recipe.name}: samples of {name!r} must be at least 1, got {count}. Correct the count."
            )

    def counted(table: RecipeTable) -> RecipeTable:
        sources = tuple(replace(s, samples=counts.get(s.name, s.samples)) for s in table.sources)
        return replace(table, sources=sources)

    return replace(recipe, tables=tuple(counted(table) for table in recipe.tables))


def _check_names(recipe: Recipe, names: Iterable[str]) -> None:
    known = [source.name for source in recipe.sources]
    lower = {name.lower(): name for name in known}  # so that a name in another case finds its match
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.0)[0]
            raise DataError(f"mixture {recipe.name}: unknown source {name!r}. The nearest is {lower[near]!r}.")


def _count(recipe: Recipe, source: RecipeSource) -> int:
    if source.samples is None:
        raise DataError(
            f"mixture {recipe.name}: the paper prints no sample count for {source.name!r}. Specify a count as its weight, or "
            "leave it out."
        )
    return source.samples
