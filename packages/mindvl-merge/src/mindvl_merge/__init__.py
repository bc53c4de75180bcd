# SPDX-License-Identifier: Apache-2.0
"""What happens after training: average weights, score models, search the test-time resolution."""

from .config import MergeConfig
from .directory import weights_sha256
from .errors import DirectoryError, MergeConfigError, MergeError
from .resolution import Cell, ResolutionGrid
from .run import merge
from .search import Box, CellScore, Request, ResolutionSearch, Scorer, box_of, choose_cell, search_resolution

__all__ = [
    "Box",
    "Cell",
    "CellScore",
    "DirectoryError",
    "MergeConfig",
    "MergeConfigError",
    "MergeError",
    "Request",
    "ResolutionGrid",
    "ResolutionSearch",
    "Scorer",
    "box_of",
    "choose_cell",
    "merge",
    "search_resolution",
    "weights_sha256",
]
