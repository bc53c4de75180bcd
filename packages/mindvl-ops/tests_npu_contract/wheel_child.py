# SPDX-License-Identifier: Apache-2.0
"""One job beside the real torch_npu, in a process of its own: JSON in, one line of JSON out."""

import json
import logging
import sys
import warnings
from typing import Any

import torch
from contract import observe, on_device
from torch._subclasses.fake_tensor import FakeTensorMode

from mindvl_ops.npu import extension
from mindvl_ops.testing.fake_npu.calls import Call


def detect(_: Any) -> dict[str, Any]:
    """What a program learns about the device."""
    why_not = extension.why_not()
    module = extension.torch_npu()
    try:
        torch.zeros(1, device="npu")
        allocation = None
    except RuntimeError as error:
        allocation = str(error).splitlines()[0]
    return {
        "version": module.__version__,
        "why_not": why_not,
        "available": module.npu.is_available(),
        "count": module.npu.device_count(),
        "allocation": allocation,
    }


def schemas(names: list[str]) -> dict[str, str]:
    """Printed schemas of the named overloads."""
    extension.torch_npu()
    return {name: str(_overload(name)._schema) for name in names}


def replay(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What can be seen of every call, under FakeTensorMode."""
    extension.torch_npu()
    import torch_npu
    import torch_npu.op_plugin.meta._meta_registrations as registrations

    registrations._npu_fusion_attention_warning_printed = True  # it would ask the driver for the name of the chip
    torch_npu.npu.current_device = torch.npu.current_device = lambda: 0
    seen = []
    with FakeTensorMode():
        for job in jobs:
            arguments = on_device(Call.from_json(job["call"]), "npu:0")
            seen.append(observe(_overload(job["call"]["op"]), arguments, job["uses"]))
    return seen


def registered(names: list[str]) -> list[bool]:
    """Whether the wheel registers these operators of PyTorch for its device."""
    from mindvl_train.rehearsal.operators import is_on_device

    extension.torch_npu()
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        found.append(is_on_device(getattr(getattr(torch.ops.aten, packet), overload or "default"), "PrivateUse1"))
    return found


def _overload(name: str) -> Any:
    packet, _, rest = name.partition(".")
    return getattr(getattr(torch.ops.npu, packet), rest or "default")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # PyTorch logs every error inside a meta kernel; we report them ourselves
    job = {"detect": detect, "schemas": schemas, "replay": replay, "registered": registered}[sys.argv[1]]
    answer = job(json.load(sys.stdin))
    print(json.dumps(answer), flush=True)
    sys.stdout.flush()
