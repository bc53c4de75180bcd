# SPDX-License-Identifier: Apache-2.0
"""The only door to torch_npu: imported at the first call, never on import of ours.

Comes before every twin in this directory: they ask `torch_npu()` for the module when they are called, so that a test can
put the contract simulator (`mindvl_ops.testing.fake_npu`) in its place. Facts of detection: `docs/design/npu.md`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from ..errors import OpsError

_module: Any = None  # imported once, or what `put` placed here


def torch_npu() -> Any:
    """The module torch_npu, or what `put` placed at the door.

    Raises:
        OpsError: torch_npu is not installed, or its runtime libraries (CANN) are missing, or it refuses this torch.
    """
    global _module
    if _module is None:
        _module = _imported()
    return _module


@contextmanager
def put(module: Any) -> Iterator[None]:
    """Run a block with `module` in the place of torch_npu; what was there before comes back."""
    global _module
    before, _module = _module, module
    try:
        yield
    finally:
        _module = before


def why_not() -> str | None:
    """Why no NPU can be used in this process, in one line; None if one can."""
    if _module is None and find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    try:
        module = torch_npu()
    except OpsError as error:
        return str(error).split(". ")[0]
    return None if module.npu.is_available() else "torch_npu finds no NPU device"


def _imported() -> Any:
    if find_spec("torch_npu") is None:
        raise OpsError("torch_npu is not installed. npu backend. Install mindvl-ops[npu], or choose backend torch.")
    try:
        import torch_npu as module
    except Exception as error:  # ImportError without CANN, RuntimeError beside CUDA, bare Exception from its checks
        reason = str(error).splitlines()[0]
        raise OpsError(
            f"torch_npu cannot be imported ({reason}). npu backend. Source the CANN set_env.sh of this machine first, "
            "or choose backend torch."
        ) from error
    ours, theirs = (version.split("+")[0].split(".")[:2] for version in (torch.__version__, module.__version__))
    if ours != theirs:
        raise OpsError(
            f"torch_npu {module.__version__} is made for another torch than {torch.__version__}. npu backend. Install "
            "the pair that mindvl-ops[npu] asks for."
        )
    return module
