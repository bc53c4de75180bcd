# SPDX-License-Identifier: Apache-2.0
"""Every call that the NPU implementations make in their own tests, made again on the wheel."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindvl_ops.testing.fake_npu import operators

HERE = Path(__file__).parent
NO_META_KERNEL = ("npu_format_cast", "npu_conv3d")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The calls of the tests of the NPU implementations, each once."""
    target = tmp_path_factory.mktemp("calls") / "calls.json"
    environment = {**os.environ, "NPU_CALLS": str(target), "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "recording", str(HERE.parent / "tests" / "npu")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:]
    return list(json.loads(target.read_text()))


def test_the_wheel_gives_every_recorded_call_the_same_outputs(recorded, with_device):
    assert recorded, "the tests of the NPU implementations made no call: the recorder is broken"
    jobs = [
        {"call": call, "uses": list(operators.declared(call["op"]).uses)}
        for call in recorded
        if call["op"] not in NO_META_KERNEL
    ]
    assert len(jobs) > 0
    wrong = []
    for job, seen in zip(jobs, with_device("replay", jobs), strict=True):
        expected = [_spec(output) for output in job["call"]["outputs"]]
        actual = [_shape_and_type(output) for output in seen.get("outputs", [])]
        if actual != expected:
            wrong.append(f"{job['call']['op']}: simulator {expected}, wheel {actual or seen}")
        wrong += _gradients(job["call"], seen)
    assert not wrong, "\n".join(wrong[:20])


def _spec(output: Any) -> Any:
    if isinstance(output, dict):
        return [output["tensor"]["shape"], f"torch.{output['tensor']['dtype']}"]
    return None if output is None else "number"


def _shape_and_type(output: Any) -> Any:
    return [output["shape"], output["dtype"]] if isinstance(output, dict) else output


def _gradients(call: dict[str, Any], seen: dict[str, Any]) -> list[str]:
    """Gradients where the simulator gives them, in the shape and type of their arguments."""
    entry = operators.declared(call["op"])
    if entry.derivative != "formula" or "gradients" not in seen:
        return []
    wrong = []
    for name in entry.learns:
        spec = call["arguments"][name]
        if spec is None or not spec["tensor"]["requires_grad"] or name == "pse":
            continue
        wanted = [spec["tensor"]["shape"], f"torch.{spec['tensor']['dtype']}"]
        found = _shape_and_type(seen["gradients"][f"{name}[0]"])
        if found != wanted:
            wrong.append(f"{call['op']}: gradient of {name}: simulator {wanted}, wheel {found}")
    return wrong
