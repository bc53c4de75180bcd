# SPDX-License-Identifier: Apache-2.0
"""Tests of what is read about the machine."""

import os
import platform
from pathlib import Path

from mindvl_cli import machine


def test_cores_are_at_least_one_and_never_more_than_the_machine_has() -> None:
    assert 1 <= machine.num_cores() <= (os.cpu_count() or 1)


def test_memory_is_more_than_this_test_needs() -> None:
    assert machine.memory_bytes() > 1 << 28


def test_devices_are_counted_by_their_numbered_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "davinci0", "davinci15", "davinci_manager"):
        (tmp_path / name).touch()

    assert machine.num_cuda_devices(tmp_path) == 2
    assert machine.num_npu_devices(tmp_path) == 2


def test_versions_name_python_and_what_is_installed() -> None:
    versions = machine.versions()

    assert versions["python"] == platform.python_version()
    assert {"mindvl-cli", "torch", "transformers"} <= set(versions)
    assert machine.installed_version("no-such-distribution") is None
