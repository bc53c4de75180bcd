# SPDX-License-Identifier: Apache-2.0
"""`mindvl doctor`: check versions, devices, memory and environment variables of this machine.

Reads files, variables and package metadata only, so that it works even if torch cannot be imported.
"""

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click

from mindvl_cli import machine
from mindvl_cli.commands.options import AS_JSON

GIB = 1 << 30
MIB = 1 << 20

# distribution: (first tested version, first version after the tested range, whether other versions are known to
# break); every pyproject.toml has the same ranges
REQUIRED = {
    "torch": ("2.13", "2.14", False),
    "megatron-core": ("0.16.1", "0.16.2", True),  # the device setup is written for this version
    "transformers": ("5.23", "5.24", False),
}
OURS = ("mindvl-data", "mindvl-ops", "mindvl-model", "mindvl-train", "mindvl-merge", "mindvl-cli")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One check."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""  # what to change, and why; empty without a finding


@click.command()
@AS_JSON
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check this machine and recommend changes.

    The exit code is 1 if training cannot work here.

    Example: mindvl doctor
    """
    rows = list(examine(os.environ))
    if as_json:
        click.echo(json.dumps({"ok": all(row.status != "fail" for row in rows), "rows": [asdict(r) for r in rows]}))
    else:
        _print_table(rows)
    ctx.exit(1 if any(row.status == "fail" for row in rows) else 0)


def examine(environment: Mapping[str, str]) -> Iterator[Row]:
    """Run every check, in the order of the table."""
    yield check_python(sys.version_info[:3])
    yield Row(name="system", status="ok", found=f"{platform.system()} {platform.release()} {platform.machine()}")
    cores = machine.num_cores()
    yield check_cores(cores)
    yield check_memory(machine.memory_bytes())
    yield check_disk(shutil.disk_usage(".").free)
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield check_shared_memory(shutil.disk_usage(shared).total)
    for name in REQUIRED:
        yield check_version(name, machine.installed_version(name))
    for name in OURS:
        version = machine.installed_version(name)
        advice = "" if version else f"Install it: pip install {name}."
        yield Row(name=name, status="ok" if version else "fail", found=version or "not installed", advice=advice)
    torch, torch_npu = machine.installed_version("torch"), machine.installed_version("torch-npu")
    yield check_cuda(machine.num_cuda_devices(), torch)
    has_cuda_build = machine.installed_version("nvidia-cudnn-cu13") is not None  # torch's CUDA build brings it
    yield check_npu(machine.num_npu_devices(), torch, torch_npu, environment, has_cuda_build=has_cuda_build)
    yield check_threads(environment.get("OMP_NUM_THREADS"), cores)
    yield from check_runtime(environment)


def check_runtime(environment: Mapping[str, str], root: Path = Path("/")) -> Iterator[Row]:
    """Check launch variables and the cores of each device, if there are devices."""
    kind: Literal["npu", "cuda"] = "npu" if machine.num_npu_devices(root / "dev") else "cuda"
    num_devices = machine.num_npu_devices(root / "dev") or machine.num_cuda_devices(root / "dev")
    if not num_devices:
        return
    try:
        from mindvl_ops.runtime import affinity, env, topology
    except Exception as error:  # torch cannot be imported, for any of many reasons
        advice = "Fix the import first: launch variables and cores are checked then."
        yield Row(name="runtime", status="warn", found=f"mindvl_ops does not import ({error})", advice=advice)
        return
    host = topology.read_topology(root)
    if kind == "npu" and not all(device.near for device in host.devices):
        host = topology.read_topology(root, npu_smi=topology.ask_npu_smi())
    for finding in env.check_variables(environment, kind, num_devices=num_devices):
        status: Literal["ok", "warn"] = "warn" if finding.status == "wrong" else "ok"
        yield Row(name=finding.name, status=status, found=finding.found or "not set", advice=finding.advice)
    binding = affinity.assign_cores(host, range(num_devices), kind=kind)
    for number, (cores, why) in enumerate(zip(binding.cores, binding.why, strict=True)):
        advice = "" if cores else f"{why}. Give the container cores of that node, or bind cores manually."
        found = topology.format_cores(cores) or "not bound"
        yield Row(name=f"cores of {kind} {number}", status="ok" if cores else "warn", found=found, advice=advice)


def check_python(version: tuple[int, int, int]) -> Row:
    """Python 3.11 to 3.13 are tested."""
    found = ".".join(map(str, version))
    if version < (3, 11, 0):
        return Row(
            name="python", status="fail", found=found, advice="Use Python 3.11 or newer: older ones lack syntax."
        )
    if version >= (3, 14, 0):
        return Row(name="python", status="warn", found=found, advice="Use 3.11 to 3.13: newer ones are not tested.")
    return Row(name="python", status="ok", found=found)


def check_cores(cores: int) -> Row:
    """The demo was measured on two cores or more."""
    advice = (
        "" if cores > 1 else "Use 2 cores or more: data loading and training share one core, so the demo takes longer."
    )
    return Row(name="cores", status="ok" if cores > 1 else "warn", found=str(cores), advice=advice)


def check_memory(memory_bytes: int) -> Row:
    """The quick demo fits into 4 GiB."""
    low = memory_bytes < 4 * GIB
    advice = "Use 4 GiB or more: with less, the demo may be killed." if low else ""
    return Row(name="memory", status="warn" if low else "ok", found=f"{memory_bytes / GIB:.1f} GiB", advice=advice)


def check_disk(free_bytes: int) -> Row:
    """A checkpoint that does not fit on the disk costs the training time before it."""
    found = f"{free_bytes / GIB:.1f} GiB free in {Path.cwd().name or 'the working directory'}"
    if free_bytes < GIB // 2:
        return Row(name="disk", status="fail", found=found, advice="Free some space: checkpoints will not fit.")
    if free_bytes < 5 * GIB:
        return Row(
            name="disk", status="warn", found=found, advice="Free some space: a few checkpoints will fill the disk."
        )
    return Row(name="disk", status="ok", found=found)


def check_shared_memory(total_bytes: int) -> Row:
    """Containers are often started with 64 MiB."""
    low = total_bytes < 512 * MIB
    found = f"{total_bytes / MIB:.0f} MiB in /dev/shm"
    advice = "Start the container with --shm-size=8g: processes of one run exchange tensors through it." if low else ""
    return Row(name="shared memory", status="warn" if low else "ok", found=found, advice=advice)


def check_version(name: str, version: str | None) -> Row:
    """A library of the tested set against the range it was tested in."""
    first, end, breaks = REQUIRED[name]
    if version is None:
        return Row(
            name=name,
            status="fail",
            found="not installed",
            advice=f"Install it: pip install '{name}>={first},<{end}'.",
        )
    if _numbers(first) <= _numbers(version) < _numbers(end):
        return Row(name=name, status="ok", found=version)
    why = "others are known to break" if breaks else "others are not tested"
    advice = f"Use {name}>={first},<{end} instead of {version}: {why}."
    return Row(name=name, status="fail" if breaks else "warn", found=version, advice=advice)


def check_cuda(num_devices: int, torch: str | None) -> Row:
    """Report devices that the installed torch cannot use."""
    if num_devices and torch and "+cpu" in torch:
        advice = "Install the CUDA build of torch: this one uses the CPU only."
        return Row(name="cuda", status="warn", found=f"{num_devices} devices, torch {torch}", advice=advice)
    return Row(name="cuda", status="ok", found=f"{num_devices} devices" if num_devices else "none")


def check_npu(
    num_devices: int,
    torch: str | None,
    torch_npu: str | None,
    environment: Mapping[str, str],
    *,
    has_cuda_build: bool = False,
) -> Row:
    """NPUs need torch_npu of the same minor version as torch, and the variables of the CANN toolkit."""
    found = f"{num_devices} devices, torch-npu {torch_npu or 'not installed'}" if num_devices or torch_npu else "none"
    if num_devices and not torch_npu:
        advice = "Install torch-npu: pip install 'mindvl-ops[npu]'; without it training runs on the CPU."
        return Row(name="npu", status="fail", found=found, advice=advice)
    if torch_npu and torch and "+cpu" not in torch and has_cuda_build:
        advice = "Install the CPU build of torch: torch-npu ends a process that has the CUDA build."
        return Row(name="npu", status="fail", found=found, advice=advice)
    if torch and torch_npu and _numbers(torch)[:2] != _numbers(torch_npu)[:2]:
        advice = f"Install torch-npu of the same minor version as torch {torch}: its import fails otherwise."
        return Row(name="npu", status="fail", found=found, advice=advice)
    if num_devices and not environment.get("ASCEND_HOME_PATH"):
        advice = "Source set_env.sh of the CANN toolkit: torch-npu finds its libraries through ASCEND_HOME_PATH."
        return Row(name="npu", status="fail", found=found, advice=advice)
    return Row(name="npu", status="ok", found=found)


def check_threads(omp_num_threads: str | None, cores: int) -> Row:
    """OMP_NUM_THREADS decides how many cores one training process uses on a CPU."""
    name = "OMP_NUM_THREADS"
    if omp_num_threads is None:
        return Row(name=name, status="ok", found="not set: one process uses every core")
    if not omp_num_threads.isdigit() or int(omp_num_threads) < 1:
        return Row(name=name, status="warn", found=repr(omp_num_threads), advice="Set a whole number, or unset it.")
    if int(omp_num_threads) > cores:
        advice = f"Set {cores} or less: more threads than cores slow each other down."
        return Row(name=name, status="warn", found=omp_num_threads, advice=advice)
    if int(omp_num_threads) < cores:
        advice = f"Unset it for one process on the CPU: it would use {omp_num_threads} of {cores} cores."
        return Row(name=name, status="warn", found=omp_num_threads, advice=advice)
    return Row(name=name, status="ok", found=omp_num_threads)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _print_table(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table(box=None, pad_edge=False)
    for title in ("", "", "found", "what to change, and why"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(Text(row.status, style=colours[row.status]), row.name, row.found, row.advice)
    Console(markup=False).print(table)
