# SPDX-License-Identifier: Apache-2.0
"""The data recipes of the MindVL paper as data: shares, an audit of its figures, and a map to the user's shards."""

from mindvl_data.recipes.audit import audit, recompute, recompute_tokens
from mindvl_data.recipes.load import list_recipes, load_recipe
from mindvl_data.recipes.mapping import find_directories, map_recipe, with_samples
from mindvl_data.recipes.types import Budget, Finding, Recipe, RecipeSource, RecipeTable, Statement, Subtotal

__all__ = [
    "Budget",
    "Finding",
    "Recipe",
    "RecipeSource",
    "RecipeTable",
    "Statement",
    "Subtotal",
    "audit",
    "find_directories",
    "list_recipes",
    "load_recipe",
    "map_recipe",
    "recompute",
    "recompute_tokens",
    "with_samples",
]
