# SPDX-License-Identifier: Apache-2.0
"""Compile the stub runtime for the installed torch_npu wheel, and name the environment in which a process finds it.

Used by the contract tests and by rehearsals on an NPU. The dynamic linker reads the variables when a process starts, so
torch_npu must be imported in a new process with this environment.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

from ...errors import OpsError

_HERE = Path(__file__).parent
_SONAMES = ("libhccl", "libascendcl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel")
_OF_CANN = re.compile(r"(acl|rt|Hccl|Msprof)[A-Za-z0-9_]+")


def wheel_directory() -> Path:
    """Directory of the installed torch_npu.

    Raises:
        OpsError: torch_npu, a C compiler or nm is missing.
    """
    try:
        found = importlib.metadata.distribution("torch-npu").locate_file("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        raise OpsError(
            "torch_npu: is not installed, so no NPU can be simulated. Install mindvl-ops[npu] into an environment with "
            "a CPU build of torch; no NPU and no CANN are needed."
        ) from None
    require_tool("cc", "a C compiler such as gcc")
    require_tool("nm", "binutils")
    return Path(str(found))


def stub_environment(directory: Path, *, devices: int = 1) -> dict[str, str]:
    """Compile the stub into a directory; returns the environment of a process that can import torch_npu.

    Args:
        devices: 1: the runtime shows one device, without memory and kernels; 0: every call fails.

    Raises:
        OpsError: As wheel_directory, or the compiler failed.
    """
    wheel = wheel_directory()
    defined = set(re.findall(r"\b((?:acl|rt)\w*[A-Z]\w*)\(", (_HERE / "runtime.c").read_text()))
    libraries = [*(wheel / "lib").glob("*.so"), *wheel.glob("_C*.so")]
    names = {name for library in libraries for name in _undefined(library) if _OF_CANN.fullmatch(name)}
    names |= {name for library in libraries for name in _looked_up(library)}
    for library in libraries:
        names -= _defined(library)
    (directory / "names.h").write_text("".join(f"EACH({name})\n" for name in sorted(names - defined)))
    flags = [f"-DDEVICES={devices}", f'-DNAMES="{directory / "names.h"}"']
    for soname in _SONAMES:
        compile_library(_HERE / "runtime.c", directory / f"{soname}.so", *flags, f"-Wl,-soname,{soname}.so")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ASCEND", "LD_"))}
    environment = {
        **kept,
        "LD_LIBRARY_PATH": str(directory),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    if _torch_has_cuda():
        (symbol,) = {name for library in libraries for name in _undefined(library) if "getMutableKeys" in name}
        compile_library(_HERE / "allocator_keys.c", directory / "allocator_keys.so", f'-DKEYS="{symbol}"')
        environment["LD_PRELOAD"] = str(directory / "allocator_keys.so")
    return environment


def require_tool(tool: str, package: str) -> None:
    """Check that a program is installed.

    Raises:
        OpsError: It is missing.
    """
    if shutil.which(tool) is None:
        raise OpsError(f"{tool}: was not found, and the stub of a device runtime needs it. Install {package}.")


def compile_library(source: Path, target: Path, *flags: str) -> None:
    """Compile a C file to a shared library.

    Raises:
        OpsError: The compiler is missing or failed.
    """
    require_tool("cc", "a C compiler such as gcc")
    command = ["cc", "-shared", "-fPIC", "-w", *flags, str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OpsError(
            f"{source.name}: cc failed: {done.stderr.strip()[-500:]}. Install a C compiler that builds shared libraries."
        )


def _torch_has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None


def _looked_up(library: Path) -> set[str]:
    """Names that the wheel asks the dynamic linker for when it first needs them (operators, aclnn..., excepted)."""
    found = re.findall(rb"\x00(acl(?!nn)[a-z]*[A-Z]\w+)(?=\x00)", library.read_bytes())
    return {name.decode() for name in found}


def _undefined(library: Path) -> set[str]:
    return _symbols(library, "--undefined-only")


def _defined(library: Path) -> set[str]:
    return _symbols(library, "--defined-only")


def _symbols(library: Path, which: str) -> set[str]:
    listing = subprocess.run(["nm", "-D", which, str(library)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in listing.splitlines() if line.strip()}
