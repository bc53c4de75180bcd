# SPDX-License-Identifier: Apache-2.0
"""The data mixtures of the MindVL paper: their sources, an audit of the printed figures, and a mapping to shards."""

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
