# SPDX-License-Identifier: Apache-2.0
"""Compile the stub of the CUDA runtime, and name the environment in which a CUDA build of torch finds one GPU.

Used by rehearsals on CUDA devices. The dynamic linker reads the variables when a process starts, so torch must be imported
in a new process with this environment. Device tensors must be fake there: the GPU has no memory and runs no kernel.
"""

import os
from pathlib import Path

from ..errors import OpsError
from .npu_runtime.build import compile_library

_PROCESSORS = 132  # of an H100; kernels that are never launched would read it


def cuda_stub_environment(
    directory: Path, *, name: str, memory_bytes: int, capability: tuple[int, int]
) -> dict[str, str]:
    """Compile the stub into a directory; returns the environment of a process in which torch sees the GPU.

    Args:
        name: Name of the GPU, as its driver reports it.
        capability: Compute capability of the GPU, by which torch chooses kernels.

    Raises:
        OpsError: torch was built without CUDA, or the compiler is missing or failed.
    """
    import torch

    if torch.version.cuda is None:
        raise OpsError(
            f"torch: version {torch.__version__} was built without CUDA, so no GPU can be simulated. Install a CUDA build "
            "of the same version, such as the one that pip installs on Linux by default; no GPU and no driver are needed."
        )
    library = directory / "libcuda.so.1"
    compile_library(
        Path(__file__).with_suffix(".c"),
        library,
        f"-DCUDA={torch.version.cuda.partition('.')[0]}",
        f'-DNAME="{name}"',
        f"-DMEMORY_BYTES={memory_bytes}",
        f"-DMAJOR={capability[0]}",
        f"-DMINOR={capability[1]}",
        f"-DPROCESSORS={_PROCESSORS}",
        f"-Wl,-soname,{library.name}",  # torch opens the library of the driver by this name
    )
    preloaded = [str(library), *os.environ.get("LD_PRELOAD", "").split()]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(preloaded),
        "CUDA_VISIBLE_DEVICES": "",  # what the stub does not answer fails also on a machine with a GPU
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
    }
