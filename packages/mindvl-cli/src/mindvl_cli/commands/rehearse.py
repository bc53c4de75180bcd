# SPDX-License-Identifier: Apache-2.0
"""`mindvl rehearse`: run the whole step of chosen ranks at full size, without the devices and without the other ranks.

A thin layer over mindvl_train.rehearsal; pages/rehearsal.py draws the page.
"""

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.commands.options import AS_JSON, OVERRIDES, RECIPE, FiniteRange
from mindvl_cli.extras import require
from mindvl_cli.machine import memory_bytes, num_cores
from mindvl_cli.progress import progress
from mindvl_cli.units import bytes_text, seconds_text
from mindvl_cli.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mindvl_train import RunConfig
    from mindvl_train.layout_search import Machine
    from mindvl_train.rehearsal.record import RankRecord
    from mindvl_train.resolved_run import ResolvedRun


@click.command(epilog="Example: mindvl rehearse recipes/mindvl-8b/sft.yaml --device 910b2 --devices 128")
@RECIPE
@OVERRIDES
@click.option("--device", required=True, help="NPU or GPU model, such as 910b2 or h100; or cpu.")
@click.option(
    "--devices", "num_devices", type=click.IntRange(min=1), default=8, show_default=True, help="Number of devices."
)
@click.option(
    "--ranks",
    metavar="all|RANK,...",
    help="Ranks to rehearse; all: a larger sample of every class of equal ranks. [default: one of each class]",
)
@click.option(
    "--memory-gb",
    type=FiniteRange(min=0, min_open=True),
    help="Memory per device in GB (10^9 bytes). [default: from the device table]",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for records, page and traces. [default: rehearsal/DEVICE-DEVICES in `out` of the recipe]",
)
@AS_JSON
def rehearse(
    recipe: Path,
    overrides: tuple[str, ...],
    device: str,
    num_devices: int,
    ranks: str | None,
    memory_gb: float | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run one training step of RECIPE at full size, without its devices.

    Each chosen rank runs the code of the training loop in one process, with all microbatches of a step, on fake tensors,
    and collectives are recorded instead of sent. The result states whether the job fits into memory, whether the messages
    of the ranks match, and which operators the device library does not implement; the exit code is 1 if the job cannot run
    for one of these reasons. KEY=VALUE overrides one value of the recipe. docs/guides/rehearse.md lists what a rehearsal
    does not cover.
    """
    require("plots", "mindvl rehearse")
    from mindvl_cli.pages.rehearsal import rehearsal_page
    from mindvl_cli.pipeline_file import load_recipe
    from mindvl_train.rehearsal.store import PAGE, SUMMARY, directory_of, record_path, remove_others, trace_path
    from mindvl_train.rehearsal.trace import trace

    config = load_recipe(recipe, overrides)
    directory = out or directory_of(config, device, num_devices)
    with ExitStack() as held:
        records, document = _rehearsed(recipe, config, device, num_devices, ranks, memory_gb, directory, held)
        remove_others(directory, [record.rank for record in records])
        for record in records:
            write_whole(record_path(directory, record.rank), record.as_json())
            write_whole(trace_path(directory, record.rank), json.dumps(trace([record])))
        write_whole(directory / PAGE, rehearsal_page(document, records))
        write_whole(directory / SUMMARY, json.dumps(document, indent=1) + "\n")  # last: a dry run looks for it
    if as_json:
        click.echo(json.dumps(document))
    else:
        click.echo(_text(document))
        click.echo(f"page: {directory / PAGE}; records and traces (ui.perfetto.dev) of each rank beside it")
    if not document["ok"]:
        sys.exit(1)


def _rehearsed(
    recipe: Path,
    config: "RunConfig",
    device: str,
    num_devices: int,
    ranks: str | None,
    memory_gb: float | None,
    directory: Path,
    held: ExitStack,
) -> "tuple[Sequence[RankRecord], dict[str, Any]]":
    """Run the chosen ranks; their records, and all figures as one document. `held` gets the lock of the directory."""
    from mindvl_train.claim import claimed
    from mindvl_train.layout_search import measure
    from mindvl_train.rehearsal.classes import class_of, rank_classes, select_ranks
    from mindvl_train.rehearsal.job import job_of, kind_of
    from mindvl_train.rehearsal.pool import num_parallel, rehearse_ranks
    from mindvl_train.rehearsal.store import expected_s, log_path
    from mindvl_train.rehearsal.summary import summarize
    from mindvl_train.rehearsal.verdict import judge
    from mindvl_train.resolved_run import resolve_run

    kind = kind_of(device)
    run = resolve_run(config, num_devices)
    first = job_of(config, recipe=str(recipe), device=device, world_size=num_devices, rank=0)
    classes = rank_classes(run, first.pack)
    selection = select_ranks(run, classes, ranks)
    jobs = [
        job_of(config, recipe=str(recipe), device=device, world_size=num_devices, rank=rank) for rank in selection.ranks
    ]
    at_once = min(len(jobs), num_parallel(num_cores(), memory_bytes()))
    seconds = {rank: expected_s(run, class_of(classes, rank).pp_rank) for rank in selection.ranks}
    _announce(run, len(jobs), sum(seconds.values()) / at_once, selection.rule)
    held.enter_context(claimed(directory))
    began = time.monotonic()
    with progress("rehearse", total=100, unit="%") as advance:
        done = 0.0

        def report(shares: "Mapping[int, float]") -> None:
            nonlocal done
            now = 100 * sum(seconds[rank] * share for rank, share in shares.items()) / sum(seconds.values())
            finished = sum(share == 1 for share in shares.values())
            advance(round(now - done, 1), note=f"{finished} of {len(jobs)} ranks")
            done += round(now - done, 1)

        records = rehearse_ranks(
            jobs, at_once=at_once, log_path=lambda rank: log_path(directory, rank), on_progress=report
        )
    machine = _machine(device, num_devices, memory_gb)
    gigabytes = memory_gb or (memory_bytes() / 1e9 / num_devices if machine is None else machine.device.memory_gb)
    verdict = judge(records, classes, memory_bytes=1e9 * gigabytes, kind=kind)
    job = measure.Job(run=run, pack=first.pack)
    document = summarize(records, job, classes, selection, verdict, machine)
    return records, document | {"wall_s": time.monotonic() - began}


def _announce(run: "ResolvedRun", num_ranks: int, seconds: float, rule: str) -> None:
    click.echo(
        f"{num_ranks} of {run.num_processes:,} ranks ({rule}), {run.num_microbatches} packed sequences each; about "
        f"{max(1, round(seconds / 60))} min",
        err=True,
    )


def _machine(device: str, num_devices: int, memory_gb: float | None) -> "Machine | None":
    """The devices of the job; None on CPUs."""
    from mindvl_train.devices import find_device
    from mindvl_train.layout_search import Machine

    found = find_device(device)
    return None if found is None else Machine(device=found, num_devices=num_devices, memory_gb=memory_gb)


def _text(document: dict[str, Any]) -> str:
    """The result for a terminal: one sentence, the reasons, and one line for each rank."""
    lines = [f"{document['recipe']} on {document['devices']:,} x {document['device']} {document['sentence']}"]
    lines += [f"  reason: {reason}" for reason in document["reasons"]]
    lines += [f"  {one}" for one in document["unequal"]]
    for figures in document["ranks"]:
        held = sorted(figures["peak"]["categories"].items(), key=lambda item: -item[1])[:4]
        waits = sum(wait["count"] for wait in figures["waits"])
        lines.append(
            f"  rank {figures['rank']} ({figures['content']}): peak {bytes_text(figures['peak_bytes'])} "
            f"({', '.join(f'{name} {bytes_text(size)}' for name, size in held)}), {waits:,} host waits; rehearsed in "
            f"{seconds_text(figures['wall_s'])}"
        )
    return "\n".join(lines)
