# SPDX-License-Identifier: Apache-2.0
"""The only module that imports torch_npu, at the first call and never when mindvl_ops itself is imported.

Comes before every implementation in this directory: they call `torch_npu()` at run time, so that a test can replace the
module by the simulator (`mindvl_ops.testing.fake_npu`). How an NPU is detected: `docs/design/npu.md`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from ..errors import OpsError

_WHERE = "npu backend"
_module: Any = None  # imported once, or the module given to `replaced_by`


def torch_npu() -> Any:
    """The module torch_npu, or the one given to `replaced_by`.

    Raises:
        OpsError: torch_npu is not installed, or its runtime libraries (CANN) are missing, or it refuses this torch.
    """
    global _module
    if _module is None:
        _module = _imported()
    return _module


@contextmanager
def replaced_by(module: Any) -> Iterator[None]:
    """Use `module` in place of torch_npu inside the block, and restore the earlier module after it."""
    global _module
    before, _module = _module, module
    try:
        yield
    finally:
        _module = before


def why_not() -> str | None:
    """The reason why this process cannot use an NPU, in one line; None if it can."""
    if _module is None and find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    try:
        module = torch_npu()
    except OpsError as error:
        return str(error).removeprefix(f"{_WHERE}: ").split(". ")[0]
    return None if module.npu.is_available() else "torch_npu finds no NPU device"


def _imported() -> Any:
    if find_spec("torch_npu") is None:
        raise OpsError(f"{_WHERE}: torch_npu is not installed. Install mindvl-ops[npu], or choose backend torch.")
    try:
        import torch_npu as module
    except Exception as error:  # ImportError without CANN, RuntimeError beside CUDA, bare Exception from its checks
        reason = str(error).splitlines()[0]
        raise OpsError(
            f"{_WHERE}: torch_npu cannot be imported ({reason}). Source the CANN set_env.sh of this machine first, "
            "or choose backend torch."
        ) from error
    ours, theirs = (version.split("+")[0].split(".")[:2] for version in (torch.__version__, module.__version__))
    if ours != theirs:
        raise OpsError(
            f"{_WHERE}: torch_npu {module.__version__} is built for another version of torch than {torch.__version__}. Install "
            "the pair that mindvl-ops[npu] asks for."
        )
    return module
