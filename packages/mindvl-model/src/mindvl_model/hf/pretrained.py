# SPDX-License-Identifier: Apache-2.0
"""Models and processors that transformers itself loads from a directory: no code runs unless allowed.

Comes before parity and evaluation compare with them or use them. A model directory may carry Python files (remote
code); they run with all rights of the user, so they run only where the caller says so.
"""

from pathlib import Path
from typing import Any

from mindvl_model.errors import ModelError


def from_pretrained(auto_class: Any, path: Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """What `auto_class.from_pretrained` makes of a directory.

    Args:
        auto_class: One of transformers' Auto classes.
        trust_remote_code: Run Python files of the directory where transformers has no class of its own for it.

    Raises:
        ModelError: The directory needs code of its own and that is not allowed, or transformers cannot load it.
    """
    try:
        return auto_class.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, local_files_only=True, **options
        )
    except Exception as error:  # transformers and the directory's code raise anything for a damaged directory
        if not trust_remote_code and "trust_remote_code" in str(error):
            files = ", ".join(sorted(file.name for file in path.glob("*.py"))) or "Python files"
            raise ModelError(
                f"{path}: the directory can only be loaded with its own code ({files}), which runs with all your "
                "rights. If you trust who wrote it, allow it with --trust-remote-code."
            ) from error
        raise ModelError(
            f"{path}: {auto_class.__name__} cannot load the directory ({type(error).__name__}: {error}). Give a whole "
            "model directory; `mindvl convert` makes one."
        ) from error
