# SPDX-License-Identifier: Apache-2.0
"""Load models and processors with transformers, running remote code only if the caller allows it.

Used by the parity check and by evaluation. A model directory may contain Python files (remote code), which run with all
permissions of the user.
"""

from pathlib import Path
from typing import Any

from mindvl_model.errors import ModelError


def from_pretrained(auto_class: Any, path: Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Call `auto_class.from_pretrained` on a local directory.

    Args:
        auto_class: An Auto class of transformers.
        path: The directory.
        trust_remote_code: Run the Python files of the directory if transformers has no class for the model.
        options: Further arguments of `from_pretrained`.

    Raises:
        ModelError: The directory needs remote code and `trust_remote_code` is False, or transformers cannot load it.
    """
    try:
        return auto_class.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, local_files_only=True, **options
        )
    except Exception as error:  # transformers and remote code raise any exception for a damaged directory
        text = " ".join(str(error).split()).rstrip(".")  # errors of configurations have several lines
        if not trust_remote_code and "trust_remote_code" in str(error):
            files = ", ".join(sorted(file.name for file in path.glob("*.py"))) or "Python files"
            raise ModelError(
                f"{path}: loading requires the remote code of the directory ({files}), which runs with all your "
                "permissions. If you trust its author, add --trust-remote-code."
            ) from error
        if isinstance(error, ImportError):
            raise ModelError(
                f"{path}: {auto_class.__name__} needs a library that is not installed: {text}. Install it; processors of "
                "Qwen models with videos need torchvision."
            ) from error
        raise ModelError(
            f"{path}: {auto_class.__name__} cannot load the directory ({type(error).__name__}: {text}). Use a "
            "complete model directory, for example from `mindvl convert`."
        ) from error
