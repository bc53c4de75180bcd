# SPDX-License-Identifier: Apache-2.0
"""Steps after training: average weights, and search the test-time image resolution.

The public names are imported on first use (PEP 562), so that `import mindvl_merge` loads neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import MergeConfig
    from .directory import weights_sha256
    from .errors import DirectoryError, MergeConfigError, MergeError
    from .resolution import Cell, ResolutionGrid
    from .run import merge
    from .search import Box, CellScore, Request, ResolutionSearch, Scorer, box_of, choose_cell, search_resolution

_MODULES = {
    "config": ("MergeConfig",),
    "directory": ("weights_sha256",),
    "errors": ("DirectoryError", "MergeConfigError", "MergeError"),
    "resolution": ("Cell", "ResolutionGrid"),
    "run": ("merge",),
    "search": (
        "Box",
        "CellScore",
        "Request",
        "ResolutionSearch",
        "Scorer",
        "box_of",
        "choose_cell",
        "search_resolution",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

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

if not TYPE_CHECKING:  # a type checker would accept every name otherwise

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
