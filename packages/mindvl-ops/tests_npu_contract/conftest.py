# SPDX-License-Identifier: Apache-2.0
"""Build the stub runtime beside the real wheel and run Python children against it.

torch_npu is never imported by pytest's own process: that one holds the simulator, the children the wheel.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SONAMES = ("libhccl", "libascendcl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel")
OF_CANN = re.compile(r"(acl|rt|Hccl|Msprof)[A-Za-z0-9_]+")

Child = Callable[..., Any]


@pytest.fixture(scope="session")
def wheel() -> Path:
    """Directory of the installed torch_npu."""
    try:
        found = importlib.metadata.distribution("torch-npu").locate_file("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torch-npu is not installed; run `nox -s npu_contract`")
    for tool in ("cc", "nm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: the stub runtime cannot be compiled")
    return Path(str(found))


@pytest.fixture(scope="session")
def without_device(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Child:
    """Run a job of `wheel_child.py` where every runtime call fails."""
    return _child(_environment(wheel, tmp_path_factory.mktemp("none"), devices=0))


@pytest.fixture(scope="session")
def with_device(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Child:
    """Run a job of `wheel_child.py` where the runtime shows one device."""
    return _child(_environment(wheel, tmp_path_factory.mktemp("one"), devices=1))


@pytest.fixture(scope="session")
def environment_with_device(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that can import torch_npu and sees one device."""
    return _environment(wheel, tmp_path_factory.mktemp("whole"), devices=1)


def _child(environment: dict[str, str]) -> Child:
    def run(job: str, payload: Any = None) -> Any:
        command = [sys.executable, str(HERE / "wheel_child.py"), job]
        done = subprocess.run(command, input=json.dumps(payload), capture_output=True, text=True, env=environment)
        assert done.returncode == 0, f"{job} ended with {done.returncode}\n{done.stderr[-4000:]}"
        return json.loads(done.stdout.splitlines()[-1])

    return run


def _environment(wheel: Path, directory: Path, *, devices: int) -> dict[str, str]:
    """Compile the stubs into `directory`; the environment in which a child finds them."""
    defined = set(re.findall(r"\b((?:acl|rt)\w*[A-Z]\w*)\(", (HERE / "runtime.c").read_text()))
    libraries = [*(wheel / "lib").glob("*.so"), *wheel.glob("_C*.so")]
    names = {name for library in libraries for name in _undefined(library) if OF_CANN.fullmatch(name)}
    names |= {name for library in libraries for name in _looked_up(library)}
    for library in libraries:
        names -= _defined(library)
    (directory / "names.h").write_text("".join(f"EACH({name})\n" for name in sorted(names - defined)))
    flags = [f"-DDEVICES={devices}", f'-DNAMES="{directory / "names.h"}"']
    for soname in SONAMES:
        _compile(HERE / "runtime.c", directory / f"{soname}.so", *flags, f"-Wl,-soname,{soname}.so")
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
        _compile(HERE / "allocator_keys.c", directory / "allocator_keys.so", f'-DKEYS="{symbol}"')
        environment["LD_PRELOAD"] = str(directory / "allocator_keys.so")
    return environment


def _torch_has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None


def _compile(source: Path, target: Path, *flags: str) -> None:
    command = ["cc", "-shared", "-fPIC", "-w", *flags, str(source), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, text=True)


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
