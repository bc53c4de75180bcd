# SPDX-License-Identifier: Apache-2.0
"""One tiny MindVL forward and backward beside the real torch_npu: device setup, megatron-core, NPU operators in every layer.

Fake tensors carry shapes, types and the device, no values. Prints one line of JSON. A process of its own, because the
the device setup and the wheel change PyTorch for the rest of the process.
"""

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mindvl_model.accelerator import set_up_device
from mindvl_ops import OpsConfig, select_backends

DEVICE = "npu:0"
ON_HOST = ("cu_seqlens", "image_grid_thw", "video_grid_thw")  # the model reads them there


class _Count(TorchDispatchMode):
    """Which operators of the wheel run, how often."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "npu":
            self.calls[func._schema.name.removeprefix("npu::")] += 1
        return func(*args, **(kwargs or {}))


def main() -> dict[str, Any]:
    """Build, forward, backward; what could be seen."""
    set_up_device("npu")
    import torch_npu
    import torch_npu.op_plugin.meta._meta_registrations as registrations

    registrations._npu_fusion_attention_warning_printed = True  # it would ask the driver for the name of the chip
    torch_npu.npu.current_device = torch.npu.current_device = lambda: 0
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_model.megatron.process import single_process
    from mindvl_model.model import MindVLModel
    from mindvl_model.random_inputs import pack_segments, random_segment
    from mindvl_model.testing.tiny import smallest_config

    select_backends(OpsConfig(backend="npu"))
    config = smallest_config()
    pack = pack_segments([random_segment(config, [(1, 4, 6)], seed=1), random_segment(config, num_text=9, seed=2)])
    del pack["loss_positions"]  # counted on the host, where a fake tensor has no value; test_rehearsal.py has them
    placeholders = int((pack["input_ids"] == config.tokens.image).sum())
    with single_process():
        model = MindVLModel(config, BuildConfig(dtype=torch.bfloat16))
        not_pinned = mock.patch.object(Tensor, "pin_memory", lambda self: self)  # a fake tensor cannot be
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with not_pinned, fake, _known_places([placeholders, 0]), _Count() as count:
            _move(model)
            loss = model(**{name: value if name in ON_HOST else _like(value) for name, value in pack.items()})
            loss.backward()
        return {
            "loss": [list(loss.shape), str(loss.dtype), loss.device.type],
            "without_gradient": [name for name, p in model.named_parameters() if p.grad is None],
            "wrong_gradient": [
                name
                for name, p in model.named_parameters()
                if p.grad is not None and (p.grad.shape, p.grad.dtype, p.grad.device) != (p.shape, p.dtype, p.device)
            ],
            "devices": sorted({p.device.type for p in model.parameters()}),
            "calls": dict(count.calls),
        }


def _like(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device=DEVICE) if isinstance(value, Tensor) else value


def _move(model: nn.Module) -> None:
    """Every parameter and buffer becomes a fake one on the device; what megatron-core wrote on it stays."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved = nn.Parameter(_like(parameter), requires_grad=parameter.requires_grad)
                moved.__dict__.update(parameter.__dict__)
                module._parameters[name] = moved
        for name, buffer in module._buffers.items():
            module._buffers[name] = _like(buffer)


@contextmanager
def _known_places(counts: list[int]) -> Iterator[None]:
    """Fake tensors have no values: tell how many image and video placeholders `nonzero` would find, in this order."""
    left = iter(counts)

    def nonzero(self: Tensor) -> Tensor:
        return torch.empty(next(left), self.dim(), dtype=torch.int64, device=self.device)

    with mock.patch.object(Tensor, "nonzero", nonzero):
        yield


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main()), flush=True)
