# SPDX-License-Identifier: Apache-2.0
"""The variables that torch_npu, HCCL and the host threads read at start: value, reason, version, what each excludes.

Comes before torch_npu is imported, which reads most of them once. Nothing is set on import; `missing_variables` says
what to set, `check_variables` what is wrong. Sources: documents and source of Ascend/pytorch (2.13), CANN's list of
environment variables, the scripts of MindSpeed-MM. Ascend ones have not been tried on hardware here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Device = Literal["npu", "cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One variable of a training run."""

    name: str
    value: str  # what a run should have
    why: str
    device: Device
    since: tuple[int, ...] = (2, 1)  # first torch_npu that reads it
    when: Literal["always", "several devices"] = "always"
    accepts: Callable[[str], bool] = lambda value: True  # values that its reader takes
    allowed: str = ""  # the same in words


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A variable that is not as it should be."""

    name: str
    found: str | None
    status: Literal["missing", "differs", "wrong"]  # wrong: refused by its reader, or in conflict with another
    advice: str  # what to set, and why


def _one_of(*values: str) -> dict[str, object]:
    return {"accepts": lambda value: value in values, "allowed": "one of " + ", ".join(values)}


def _between(low: int, high: int) -> dict[str, object]:
    return {"accepts": lambda value: value.isdigit() and low <= int(value) <= high, "allowed": f"{low} to {high}"}


def _variable(name: str, value: str, why: str, device: Device, rule: Mapping[str, object], **more: object) -> Variable:
    return Variable(name=name, value=value, why=why, device=device, **rule, **more)  # type: ignore[arg-type]


VARIABLES: tuple[Variable, ...] = (
    _variable(
        "TASK_QUEUE_ENABLE", "2", "a second thread launches kernels and moves their workspace work there; 1 needs less "
        "memory at its peak", "npu", _one_of("0", "1", "2"),
    ),
    _variable(
        "COMBINED_ENABLE", "1", "chains of views become one copy where a kernel wants contiguous input", "npu",
        _one_of("0", "1"),
    ),
    _variable(
        "ACLNN_CACHE_LIMIT", "100000", "packed sequences have many shapes; the default of 10,000 entries for each operator "
        "is soon full", "npu", _between(1, 10_000_000),
    ),
    _variable(
        "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "packed sequences of different visual load fragment the memory "
        "otherwise", "npu", {},
    ),
    _variable("INF_NAN_MODE_ENABLE", "1", "infinities and NaN as in IEEE 754, so that they show in the loss", "npu",
              _one_of("0", "1")),
    _variable(
        "HCCL_CONNECT_TIMEOUT", "1800", "ranks start minutes apart when they load weights; the default waits 120 s",
        "npu", _between(120, 7200), when="several devices",
    ),
    _variable(
        "OMP_NUM_THREADS", "1", "one process for each device: more threads in each make all wait for each other", "npu",
        _between(1, 4096), when="several devices",
    ),
    _variable(
        "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "packs with different numbers of patches fragment the "
        "memory otherwise", "cuda", {},
    ),
    _variable(
        "CUDA_DEVICE_MAX_CONNECTIONS", "1", "with tensor parallel, communication must be queued before the matmul it "
        "overlaps with", "cuda", _between(1, 32), when="several devices",
    ),
    _variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "a lost rank ends the run instead of hanging it", "cuda",
        _one_of("0", "1", "2", "3"), when="several devices",
    ),
)  # fmt: skip


def run_variables(device: Device, *, num_devices: int = 1, torch_npu: tuple[int, ...] | None = None) -> list[Variable]:
    """The variables that a run on `num_devices` devices of one kind should have.

    Args:
        torch_npu: Its version; variables that it does not read are left out. None: the newest.
    """
    return [
        variable
        for variable in VARIABLES
        if variable.device == device
        and (variable.when == "always" or num_devices > 1)
        and (torch_npu is None or variable.since <= torch_npu)
    ]


def missing_variables(
    environment: Mapping[str, str],
    device: Device,
    *,
    num_devices: int = 1,
    memory_tight: bool = False,
    torch_npu: tuple[int, ...] | None = None,
) -> dict[str, str]:
    """What to set before the device's library is imported; what the user has set is never replaced.

    Args:
        memory_tight: Prefer memory to speed where the two differ.
    """
    wanted = {v.name: v.value for v in run_variables(device, num_devices=num_devices, torch_npu=torch_npu)}
    if memory_tight and "TASK_QUEUE_ENABLE" in wanted:
        wanted["TASK_QUEUE_ENABLE"] = "1"
    if environment.get("ASCEND_LAUNCH_BLOCKING") == "1":
        wanted.pop("TASK_QUEUE_ENABLE", None)  # it forces 0
    if "PYTORCH_ALLOC_CONF" in environment:
        for name in ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            wanted.pop(name, None)  # only one of the two may be set on an NPU; on CUDA it has the user's own settings
    return {name: value for name, value in wanted.items() if name not in environment}


def check_variables(
    environment: Mapping[str, str],
    device: Device,
    *,
    num_devices: int = 1,
    torch_npu: tuple[int, ...] | None = None,
) -> list[Finding]:
    """What is set wrongly, differently, or not at all, each with the reason."""
    found: list[Finding] = []
    missing = missing_variables(environment, device, num_devices=num_devices, torch_npu=torch_npu)
    for variable in run_variables(device, num_devices=num_devices, torch_npu=torch_npu):
        value = environment.get(variable.name)
        if value is None:
            if variable.name in missing:
                advice = f"`mindvl train` sets {variable.value}: {variable.why}."
                found.append(Finding(name=variable.name, found=None, status="missing", advice=advice))
        elif not variable.accepts(value):
            advice = f"Set {variable.value} (it takes {variable.allowed}): {variable.why}."
            found.append(Finding(name=variable.name, found=value, status="wrong", advice=advice))
        elif value != variable.value:
            advice = f"{variable.value} is usual: {variable.why}."
            found.append(Finding(name=variable.name, found=value, status="differs", advice=advice))
    if device == "npu":
        found += _conflicts(environment)
    return found


def _conflicts(environment: Mapping[str, str]) -> list[Finding]:
    """Variables of an NPU that exclude each other."""
    conflicts: list[Finding] = []

    def wrong(name: str, advice: str) -> None:
        conflicts.append(Finding(name=name, found=environment.get(name), status="wrong", advice=advice))

    if environment.get("ASCEND_LAUNCH_BLOCKING") == "1":
        wrong("ASCEND_LAUNCH_BLOCKING", "Unset it but for debugging: every kernel waits for the one before it.")
    if "PYTORCH_NPU_ALLOC_CONF" in environment and "PYTORCH_ALLOC_CONF" in environment:
        wrong("PYTORCH_ALLOC_CONF", "Keep one of PYTORCH_ALLOC_CONF and PYTORCH_NPU_ALLOC_CONF: both are refused.")
    settings = environment.get("PYTORCH_NPU_ALLOC_CONF", environment.get("PYTORCH_ALLOC_CONF", ""))
    others = [name for name in ("max_split_size_mb", "garbage_collection_threshold") if name in settings]
    expandable = "expandable_segments:True" in settings
    if expandable and others:
        wrong("PYTORCH_NPU_ALLOC_CONF", f"Take out {' and '.join(others)}: they do not go with expandable_segments.")
    if environment.get("TORCH_HCCL_ZERO_COPY") == "1" and not expandable:
        wrong(
            "TORCH_HCCL_ZERO_COPY", "It needs PYTORCH_NPU_ALLOC_CONF=expandable_segments:True. Set that, or unset it."
        )
    execute, event = environment.get("HCCL_EXEC_TIMEOUT", "1836"), environment.get("HCCL_EVENT_TIMEOUT", "1868")
    if execute.isdigit() and event.isdigit() and int(event) <= int(execute):
        wrong("HCCL_EVENT_TIMEOUT", f"Set more than HCCL_EXEC_TIMEOUT ({execute}): waiting ends first otherwise.")
    if environment.get("HCCL_OP_EXPANSION_MODE") == "AIV":
        wrong("HCCL_OP_EXPANSION_MODE", "Unset it: on A2, AIV is for inference with one communicator.")
    return conflicts
