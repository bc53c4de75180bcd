# SPDX-License-Identifier: Apache-2.0
"""Steps after training: average weights; `mindvl_merge.evaluation` scores models and searches the resolution.

The public names are imported on first use (PEP 562), so that `import mindvl_merge` loads neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import MergeConfig
    from .digests import directory_digest
    from .errors import DirectoryError, MergeConfigError, MergeError
    from .run import merge
    from .soup import greedy_soup

_MODULES = {
    "config": ("MergeConfig",),
    "digests": ("directory_digest",),
    "errors": ("DirectoryError", "MergeConfigError", "MergeError"),
    "run": ("merge",),
    "soup": ("greedy_soup",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "DirectoryError",
    "MergeConfig",
    "MergeConfigError",
    "MergeError",
    "directory_digest",
    "greedy_soup",
    "merge",
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
