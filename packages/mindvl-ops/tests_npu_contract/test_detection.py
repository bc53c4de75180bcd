# SPDX-License-Identifier: Apache-2.0
"""An installed wheel is not yet an NPU: the reason that is given for each state of a machine."""

import os
import subprocess
import sys


def test_the_wheel_without_a_device_is_found_and_named(without_device):
    found = without_device("detect")
    assert found["version"] == "2.13.0"
    assert found["why_not"] == "torch_npu finds no NPU device"
    assert not found["available"]
    assert found["count"] == 0
    assert found["allocation"] is not None


def test_one_device_is_found_and_has_no_memory(with_device):
    found = with_device("detect")
    assert found["why_not"] is None
    assert found["available"]
    assert found["count"] == 1
    assert found["allocation"] is not None  # the stub has a device and no memory


def test_the_wheel_without_cann_is_named_with_the_missing_library(wheel):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ASCEND", "LD_"))}
    code = "from mindvl_ops.npu import extension; print(extension.why_not())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert "torch_npu cannot be imported (libhccl.so: cannot open shared object file" in done.stdout


def test_plain_import_of_torch_fails_beside_a_wheel_without_cann(wheel):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ASCEND", "LD_"))}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    done = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr
