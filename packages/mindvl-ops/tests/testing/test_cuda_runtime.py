# SPDX-License-Identifier: Apache-2.0
"""The stub of the CUDA runtime: torch sees one GPU, on which fake tensors have gradients and real ones no memory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mindvl_ops.errors import OpsError
from mindvl_ops.testing.cuda_runtime import cuda_stub_environment

CHILD = """
import json, torch
from torch._subclasses.fake_tensor import FakeTensorMode

torch.cuda.init()
found = {
    "count": torch.cuda.device_count(),
    "name": torch.cuda.get_device_name(0),
    "capability": torch.cuda.get_device_capability(0),
    "memory": torch.cuda.get_device_properties(0).total_memory,
    "warp_size": torch.cuda.get_device_properties(0).warp_size,
    "processors": torch.cuda.get_device_properties(0).multi_processor_count,
    "pinned": torch.arange(4).pin_memory().tolist(),
}
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    event = stream.record_event()
torch.cuda.current_stream().wait_event(event)
found["done"] = event.query()
with FakeTensorMode():
    x = torch.ones(3, 4, device="cuda", requires_grad=True)
    (x @ torch.ones(4, 5, device="cuda")).relu().sum().backward()
    found["gradient"] = [str(x.grad.device), list(x.grad.shape)]
for make in (lambda: torch.empty(1, device="cuda"), lambda: torch.ones(2).cuda()):
    try:
        make()
    except torch.OutOfMemoryError:
        found["refused"] = found.get("refused", 0) + 1
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process with the stub of an H100 finds."""
    if torch.version.cuda is None or shutil.which("cc") is None:
        pytest.skip("needs a CUDA build of torch and a C compiler")
    environment = cuda_stub_environment(
        tmp_path_factory.mktemp("stub"), name="RTX 4090", memory_bytes=25_700_000_000, capability=(8, 9)
    )
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_torch_sees_one_gpu_with_the_given_properties(found: dict[str, Any]) -> None:
    """The fields at the end of the known part of the structure are at the right place, too."""
    assert (found["count"], found["name"], found["capability"]) == (1, "RTX 4090", [8, 9])
    assert (found["memory"], found["warp_size"], found["processors"]) == (25_700_000_000, 32, 132)


def test_fake_tensors_have_gradients_on_the_gpu(found: dict[str, Any]) -> None:
    assert found["gradient"] == ["cuda:0", [3, 4]]


def test_events_are_complete_and_pinned_memory_holds_values(found: dict[str, Any]) -> None:
    assert found["done"] is True
    assert found["pinned"] == [0, 1, 2, 3]


def test_real_tensors_get_no_memory(found: dict[str, Any]) -> None:
    assert found["refused"] == 2


def test_a_build_of_torch_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(OpsError, match=r"torch: version .* was built without CUDA, .* Install a CUDA build"):
        cuda_stub_environment(tmp_path, name="H100", memory_bytes=1, capability=(9, 0))


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OpsError, match=r"cc: was not found.* Install a C compiler"):
        cuda_stub_environment(tmp_path, name="H100", memory_bytes=1, capability=(9, 0))
