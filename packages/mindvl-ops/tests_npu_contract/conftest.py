# SPDX-License-Identifier: Apache-2.0
"""Build the stub runtime beside the real wheel and run Python children against it.

torch_npu is never imported by pytest's own process: that one holds the simulator, the children the wheel.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindvl_ops.errors import OpsError
from mindvl_ops.testing.npu_runtime import stub_environment, wheel_directory

HERE = Path(__file__).parent

Child = Callable[..., Any]


@pytest.fixture(scope="session")
def wheel() -> Path:
    """Directory of the installed torch_npu."""
    try:
        return wheel_directory()
    except OpsError as error:
        pytest.skip(f"{error} Or run `nox -s npu_contract`.")


@pytest.fixture(scope="session")
def without_device(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Child:
    """Run a job of `wheel_child.py` where every runtime call fails."""
    return _child(stub_environment(tmp_path_factory.mktemp("none"), devices=0))


@pytest.fixture(scope="session")
def with_device(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Child:
    """Run a job of `wheel_child.py` where the runtime shows one device."""
    return _child(stub_environment(tmp_path_factory.mktemp("one")))


@pytest.fixture(scope="session")
def environment_with_device(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that can import torch_npu and sees one device."""
    return stub_environment(tmp_path_factory.mktemp("whole"))


def _child(environment: dict[str, str]) -> Child:
    def run(job: str, payload: Any = None) -> Any:
        command = [sys.executable, str(HERE / "wheel_child.py"), job]
        done = subprocess.run(command, input=json.dumps(payload), capture_output=True, text=True, env=environment)
        assert done.returncode == 0, f"{job} ended with {done.returncode}\n{done.stderr[-4000:]}"
        return json.loads(done.stdout.splitlines()[-1])

    return run
