# SPDX-License-Identifier: Apache-2.0
"""`mindvl check`: prove on this machine that what runs fast computes what it should.

Thin: `mindvl_ops.check_operators` does the work, here it becomes a table or JSON and an exit code.
"""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mindvl_ops import CheckRow


@click.group()
def check() -> None:
    """Prove on this machine that what runs fast computes what it should."""


@check.command()
@click.option(
    "--backend", type=click.Choice(["reference", "torch", "npu"]), default="torch", show_default=True,
    help="Which implementation to check.",
)  # fmt: skip
@click.option("--device", default="cpu", show_default=True, help="Where it runs: cpu, cuda, npu.")
@click.option("--quick", is_flag=True, help="Only the errors, no times.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.pass_context
def ops(ctx: click.Context, backend: Any, device: str, quick: bool, as_json: bool) -> None:
    """Compare every operator with its reference: error forward and backward, speed. Exit code 1 if one is too far off.

    Speed is the time of the reference over that of the backend, in float32 with gradients, in the same run.

    Example: mindvl check ops --backend torch
    """
    from mindvl_ops import check_operators, table_text, use_backend

    with use_backend(backend):
        rows = check_operators(device=device, timed=not quick)
    holds = all(row.holds for row in rows)
    if as_json:
        click.echo(
            json.dumps({"ok": holds, "backend": backend, "device": device, "operators": [_plain(r) for r in rows]})
        )
    else:
        click.echo(table_text(rows))
    ctx.exit(0 if holds else 1)


def _plain(row: "CheckRow") -> dict[str, Any]:
    """JSON values; what could not run has no errors instead of NaN, which JSON does not know."""
    document = asdict(row) | {"holds": row.holds}
    for comparison in document["comparisons"].values():
        if comparison["reason"]:
            comparison["forward"] = None
    return document
