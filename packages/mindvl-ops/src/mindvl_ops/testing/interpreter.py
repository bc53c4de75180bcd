# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter for the kernels: inside the block they run on CPU tensors, without a GPU and without compilation."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import mindvl_ops.triton_backend as backend

_KERNELS = f"{backend.__name__}.kernels"


@contextmanager
def interpreted_triton() -> Iterator[None]:
    """Import a copy of triton with the switch of its interpreter, which triton reads while it is imported.

    Other code of this process may have imported triton before; its modules come back at the end. The compiled extension
    is kept, because it cannot be loaded twice.
    """
    before = _unload()
    switch = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        _unload()
        sys.modules.update(before)
        if switch is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = switch


def _unload() -> dict[str, ModuleType]:
    """Remove and return the loaded modules of triton in Python, and the kernels, which are defined by it."""
    vars(backend).pop("kernels", None)  # "from . import kernels" would find it there
    of_triton = [name for name in sys.modules if name == "triton" or name.startswith("triton.")]
    names = [name for name in [*of_triton, _KERNELS] if not name.startswith("triton._C")]
    return {name: sys.modules.pop(name) for name in names if name in sys.modules}
