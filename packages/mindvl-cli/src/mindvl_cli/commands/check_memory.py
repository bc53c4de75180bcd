# SPDX-License-Identifier: Apache-2.0
"""`mindvl check memory`: rehearsed peak memory beside the measured peak of the same steps, on this machine's CPU.

A thin layer over mindvl_train.checks.memory; check.py adds the command to its group.
"""

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from mindvl_cli.commands.options import AS_JSON

if TYPE_CHECKING:
    from mindvl_train.checks.memory import MemoryRow

BOUND = 0.01  # of the measured peak


@click.command(short_help="Compare rehearsed with measured peak memory.")
@click.option("--quick", is_flag=True, help="Compare only the jobs of one process.")
@AS_JSON
@click.pass_context
def memory(ctx: click.Context, quick: bool, as_json: bool) -> None:
    """Compare the rehearsed peak memory of small jobs with the peak of real steps on this machine's CPU.

    Each job runs two steps in real processes, in which every allocation of PyTorch is recorded, and is rehearsed rank by
    rank. The table also has the estimate of the layout search. The exit code is 1 if a rehearsed peak differs from the
    measured one by more than 1 %.

    Example: mindvl check memory --quick
    """
    # Before torch, also in the measured processes: its profiler logs errors without a GPU, its allocator a warning.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from mindvl_train.checks.memory import CASES, compare_memory

    rows = []
    for row in compare_memory(tuple(case for case in CASES if case.processes == 1 or not quick)):
        rows.append(row)
        if not as_json:
            click.echo(line_of(row))
    holds = all(abs(row.difference) <= BOUND for row in rows)
    if as_json:
        found = [asdict(row) | {"difference": row.difference} for row in rows]
        click.echo(json.dumps({"ok": holds, "bound": BOUND, "ranks": found}))
    ctx.exit(0 if holds else 1)


def line_of(row: "MemoryRow") -> str:
    """One line of the table, in MB of 10^6 bytes."""
    measured, rehearsed, estimated = (size / 1e6 for size in (row.measured, row.rehearsed, row.estimated))
    mark = "ok" if abs(row.difference) <= BOUND else "differs"
    return (
        f"{row.name:48} rank {row.rank}: measured {measured:9,.1f} MB, rehearsed {rehearsed:9,.1f} MB "
        f"({row.difference:+.1%}), estimated {estimated:9,.1f} MB  {mark}"
    )
