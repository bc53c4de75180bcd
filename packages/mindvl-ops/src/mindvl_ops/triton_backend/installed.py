# SPDX-License-Identifier: Apache-2.0
"""Whether the Triton kernels can run: the package is installed, and the tensors are on a CUDA device.

Comes before the choice of backends, which reports the reason. PyTorch's CUDA wheels install triton.
"""

from importlib.util import find_spec

from torch import Tensor

from ..errors import OpsError


def why_not() -> str | None:
    """The reason why this process has no Triton kernels, in one line; None if it has them."""
    return "triton is not installed" if find_spec("triton") is None else None


def check_device(operator: str, x: Tensor) -> None:
    """Refuse tensors on which no Triton kernel can run.

    Fake tensors run nothing, so their device does not matter. Triton's interpreter, which tests use, takes CPU tensors.

    Raises:
        OpsError: The tensor is not on a CUDA device.
    """
    if x.device.type == "cuda":
        return
    # Both at the first call only: they take a second, and a process without CUDA must not import triton.
    from torch._subclasses.fake_tensor import is_fake
    from triton import knobs

    if not knobs.runtime.interpret and not is_fake(x):
        raise OpsError(
            f"triton {operator}: the tensor is on {x.device.type}. Triton kernels need CUDA tensors; choose backend torch "
            "for this operator."
        )
