# SPDX-License-Identifier: Apache-2.0
"""One whole training step of a recipe beside the real torch_npu: every operator that reaches the device, by name.

    python whole_step.py RECIPE

Our device setup, models, megatron-core's schedule and optimizer run as in training, on rank 0 of two. Tensors of the
device are fake, host tensors are real, and no message leaves the process. Prints one line of JSON: for each operator
whether the wheel registers it for its device, and every line that makes the host wait for the device during the step, by
a read or by a blocking copy. A process of its own, because the device setup changes PyTorch for good.
"""

import json
import sys
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WORLD_SIZE = 2
NO_SHAPE_RULE = {  # operators of the wheel without one -> the argument that the result is like
    "npu::npu_format_cast": 0,
    "npu::npu_moe_gating_top_k_backward": 0,
}

RUNNING: list["Step"] = []  # the one step of this process


class Step(TorchDispatchMode):
    """Sends device work to fake tensors and host work to the CPU; keeps the operators of the device and host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.overloads: dict[str, Any] = {}
        self.waits: Counter[str] = Counter()  # by file and function

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args)
        name = func._schema.name
        if func.namespace in ("c10d", "_c10d_functional"):
            results = tuple(FakeWork().boxed() if "Work" in str(r.type) else args[0] for r in func._schema.returns)
            return results[0] if len(results) == 1 else results
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        target = torch.device(kwargs.get("device") or "meta").type  # meta: none is asked for
        if not is_fake and target != "npu":
            return func(*args, **kwargs)
        self.overloads[str(func)] = func
        if name == "aten::record_stream":
            return None
        if name == "aten::_local_scalar_dense":
            self.note_wait()
            return one_of(args[0])
        if name == "aten::_to_copy" and (is_fake == (target == "cpu")) and not kwargs.get("non_blocking", False):
            self.note_wait()
        if name == "aten::_to_copy" and is_fake and target == "cpu":
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if name in NO_SHAPE_RULE:
            with self.fake:
                return torch.empty_like(args[NO_SHAPE_RULE[name]])
        if name == "aten::copy_" and args[0].device != args[1].device:
            if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                self.note_wait()
            return args[0]
        with self.fake:
            if name == "aten::_to_copy" and not is_fake:  # host to device: nothing is read
                dtype = kwargs.get("dtype") or args[0].dtype
                return torch.empty_strided(args[0].shape, args[0].stride(), dtype=dtype, device="npu:0")
            return func(*args, **kwargs)

    def note_wait(self) -> None:
        """Count a wait at the nearest line of the project."""
        frame = sys._getframe(1)
        while frame is not None and not (
            "/mindvl_" in frame.f_code.co_filename and "/src/" in frame.f_code.co_filename
        ):
            frame = frame.f_back  # type: ignore[assignment]
        where = "autograd" if frame is None else f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_name}"
        self.waits[where] += 1


def one_of(value: Tensor) -> bool | float | int:
    """What the device might have reported to the host."""
    return True if value.dtype == torch.bool else 1.0 if value.dtype.is_floating_point else 1


def is_registered(func: Any) -> bool:
    """Whether the device computes this operator itself and torch_npu does not copy its tensors to the host.

    A composite operator calls others, which are judged themselves; one that is composite only in form (NonFunctional)
    calls its own form with `out`.
    """
    name = func._schema.name

    def has(overload: str, key: str) -> bool:
        full = f"{name}.{overload}" if overload not in ("", "default") else name
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, key))

    overload = func._overloadname
    keys = ("PrivateUse1", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    if any(has(overload, key) for key in keys):
        return True
    if not has(overload, "CompositeExplicitAutogradNonFunctional"):
        return False
    packet = getattr(getattr(torch.ops, func.namespace), name.split("::")[1])
    return any("out" in other and has(other, "PrivateUse1") for other in packet.overloads())


def main(recipe: str) -> dict[str, dict[str, Any]]:
    """Run the step; operator -> whether the wheel registers it for its device, and line -> host waits."""
    from mindvl_model import set_up_device

    device = set_up_device("npu").device()
    import torch_npu
    import torch_npu.op_plugin.meta._meta_registrations as registrations

    registrations._npu_fusion_attention_warning_printed = True  # it would ask the driver for the name of the chip
    torch_npu.npu.current_device = torch.npu.current_device = torch.cuda.current_device = lambda: 0
    place_fakes()
    step = Step()
    RUNNING.append(step)
    torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor(..., device=) fills the device below every mode
    run_step(recipe, device, step)
    operators = {name: is_registered(func) for name, func in sorted(step.overloads.items())}
    return {"operators": operators, "waits": dict(step.waits)}


def run_step(recipe: str, device: torch.device, step: Step) -> None:
    """Build, forward, backward and update, by the code of a training run."""
    from mindvl_cli.load import load_config
    from mindvl_ops import select_backends
    from mindvl_ops.npu import masks
    from mindvl_train.config import RunConfig
    from mindvl_train.layout_search.measure import RandomBatch, job_of
    from mindvl_train.megatron.groups import create_groups
    from mindvl_train.megatron.optimizer import build_optimizer, squared_norm, update, wrap_models
    from mindvl_train.megatron.pipeline import finish_router_step, forward_backward, prepare_schedule
    from mindvl_train.step_totals import reduce_totals
    from mindvl_train.weights import build_models

    config = load_config(Path(recipe), RunConfig, ["global_batch_size=4"])
    select_backends(config.ops, "npu")
    create_groups(config.seed, config.parallel, timedelta(minutes=1))
    job = job_of(config, WORLD_SIZE)
    with step:
        masks._shared[device] = torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)
        models = wrap_models(build_models(job.run, device, load_init=False), overlap=True)
        optimizer = build_optimizer(models, config.optimizer)
        prepare_schedule(models, optimizer)
        step.waits.clear()
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        loss_sum = forward_backward(models, [RandomBatch.of(job.pack, job.run.model)] * 2, device)
        totals = reduce_totals(squared_norm(optimizer), loss_sum, 1, stop=False)
        update(optimizer, 1e-4, totals.grad_norm)
        finish_router_step(models, was_applied=True)


def place_fakes() -> None:
    """Process groups that send nothing, and the few places where PyTorch reads a value below every dispatch mode."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    c10d.Backend.backend_capability["fake"] = ["cpu", "npu"]  # it is registered for other devices only
    make_group = c10d._new_process_group_helper

    def fake_group(size: int, rank: int, ranks: Any, backend: Any, store: Any, *rest: Any, **options: Any) -> Any:
        return make_group(size, rank, ranks, "fake", store, *rest, **{**options, "backend_options": None})

    def all_gather_object(found: list[Any], mine: Any, group: Any = None) -> None:
        found[:] = [mine] * len(found)

    c10d._new_process_group_helper = fake_group
    dist.all_gather_object = c10d.all_gather_object = all_gather_object
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    nn.Module._apply = apply_anew
    make_tensor = torch.tensor

    def tensor(data: Any, *rest: Any, **options: Any) -> Tensor:
        """A tensor of device scalars: C++ reads each of them below every mode."""
        if not isinstance(data, Tensor):
            data = tree_map(lambda x: x.item() if isinstance(x, FakeTensor) else x, data)
        return make_tensor(data, *rest, **options)

    torch.tensor = tensor
    FakeTensor.tolist = tolist


def tolist(self: FakeTensor) -> Any:
    """Sizes of the all-to-all: rows split evenly over the expert-parallel ranks; elsewhere ones."""
    RUNNING[0].note_wait()
    frame = sys._getframe(1)
    if frame.f_code.co_name == "_exchanged_sizes":
        rows, size = len(frame.f_back.f_locals["rows"]), frame.f_locals["self"].ep_size
        return [[rows // size + (place < rows % size) for place in range(size)]] * 2
    return torch.ones(self.shape, dtype=self.dtype).tolist()


def apply_anew(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """nn.Module._apply with new parameters: the original swaps them, which fake tensors refuse."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for name, old in self._parameters.items():
        if old is None:
            continue
        with torch.no_grad():
            new = fn(old)
        if new is not old and not (isinstance(old, FakeTensor) and new.dtype == old.dtype):
            self._parameters[name] = nn.Parameter(new, requires_grad=old.requires_grad)
            self._parameters[name].__dict__.update(old.__dict__)
    self._buffers.update({name: fn(buffer) for name, buffer in self._buffers.items() if buffer is not None})
    return self


if __name__ == "__main__":
    warnings.warn = lambda *_, **__: None  # type: ignore[assignment]
    print(json.dumps(main(sys.argv[1])), flush=True)
