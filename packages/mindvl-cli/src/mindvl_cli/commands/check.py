# SPDX-License-Identifier: Apache-2.0
"""`mindvl check`: compare operators, packing, parallel layouts and models with references on this machine.

A thin layer over `mindvl_ops.check_operators` and `mindvl_model.hf.parity`: table or JSON, a file and an exit code.
"""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from mindvl_cli.commands.alignment import alignment
from mindvl_cli.commands.check_memory import memory
from mindvl_cli.commands.check_training import packing, parallel
from mindvl_cli.commands.options import AS_JSON, OUT_FILE, TRUST_REMOTE_CODE, count_option, finite_or_none
from mindvl_cli.whole_file import write_whole

if TYPE_CHECKING:
    from mindvl_model.hf.parity import InputParity, ParityReport
    from mindvl_ops import CheckRow

NAMED_FAILURES = 10  # failing inputs listed one by one


@click.group()
def check() -> None:
    """Compare operators, packing, parallel layouts and models with references on this machine."""


check.add_command(alignment)
check.add_command(memory)
check.add_command(packing)
check.add_command(parallel)


@check.command(short_help="Compare every operator with its reference.")
@click.option(
    "--backend", type=click.Choice(["reference", "torch", "npu"]), default="torch", show_default=True,
    help="Implementation to check.",
)  # fmt: skip
@click.option("--device", default="cpu", show_default=True, help="Device that runs the operators: cpu, cuda or npu.")
@click.option("--quick", is_flag=True, help="Measure errors only, without timing.")
@AS_JSON
@click.pass_context
def ops(ctx: click.Context, backend: Any, device: str, quick: bool, as_json: bool) -> None:
    """Compare every operator with its reference: forward error, backward error and speed.

    Speed is the time of the reference divided by that of the backend, in float32 with gradients, in the same run. The
    exit code is 1 if an error exceeds its bound. An error is the largest absolute difference from the reference in float64,
    divided by max(1, largest absolute value of the reference). The bounds are 5e-6 in float32 and
    3e-2 in bfloat16.

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


@check.command(short_help="Compare a model directory with transformers.")
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@count_option("--inputs", "num_inputs", default=200, help="Number of inputs.")
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True,
    help="Data type of weights and activations.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed of the inputs.")
@click.option(
    "--one-at-a-time",
    is_flag=True,
    help="Keep only one model in memory, and the logits in a temporary directory.",
)
@TRUST_REMOTE_CODE
@click.option("--out", type=OUT_FILE, help="New CSV file for the errors of every input.")
@AS_JSON
@click.pass_context
def parity(
    ctx: click.Context,
    model: Path,
    num_inputs: int,
    dtype: Literal["fp32", "bf16"],
    seed: int,
    one_at_a_time: bool,
    trust_remote_code: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Compare the mindvl and transformers implementations of MODEL on random texts, images and videos.

    MODEL is a whole model (MindVL, Qwen2.5-VL or Qwen3-VL) or, with text inputs only, a language model of a supported family:
    docs/guides/parity.md lists them.

    Mean absolute and mean relative error of the logits (paper, A.2) must be within 0.005 for every input. The relative
    error is the mean absolute error divided by the mean absolute logit of transformers. In bf16 the bound is the larger of 0.005
    and 1.5 times the error of transformers in bf16 relative to transformers in fp32. The exit code is 1 if an input
    exceeds its bound. Both models must fit in memory together, or one by one with --one-at-a-time.

    Example: mindvl check parity Qwen2.5-VL-7B-Instruct --inputs 200 --out parity.csv
    """
    from transformers.utils import logging as transformers_logging

    from mindvl_cli.progress import reported_progress
    from mindvl_model.hf.parity import check_parity

    transformers_logging.disable_progress_bar()  # it would interrupt ours
    with reported_progress("compare", unit="inputs") as on_inputs:
        report = check_parity(
            model,
            num_inputs=num_inputs,
            dtype=dtype,
            seed=seed,
            one_at_a_time=one_at_a_time,
            trust_remote_code=trust_remote_code,
            on_inputs=on_inputs,
        )
    if out is not None:
        _write_csv(out, report)
    click.echo(json.dumps(_summary(report, model), allow_nan=False) if as_json else _parity_text(report))
    ctx.exit(1 if report.failing else 0)


def _row(one: "InputParity") -> dict[str, Any]:
    return asdict(one) | {"holds": one.holds}


def _worst(inputs: Sequence["InputParity"], error: str) -> float:
    """The largest value of one error; NaN counts as larger than any number."""
    values = [float(getattr(one, error)) for one in inputs]
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _write_csv(out: Path, report: "ParityReport") -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(_row(report.inputs[0])))
    writer.writeheader()
    writer.writerows(_row(one) for one in report.inputs)
    write_whole(out, text.getvalue())


def _summary(report: "ParityReport", model: Path) -> dict[str, Any]:
    errors = ("mae", "mre", "max_difference", "rounding_mae", "rounding_mre")
    return {
        "ok": not report.failing,
        "model": str(model),
        "model_type": report.model_type,
        "dtype": report.dtype,
        "seed": report.seed,
        "worst": {
            kind: {"inputs": len(inputs)} | {error: finite_or_none(_worst(inputs, error)) for error in errors}
            for kind, inputs in report.by_kind().items()
        },
        "failing": [{name: finite_or_none(value) for name, value in _row(one).items()} for one in report.failing],
    }


def _parity_text(report: "ParityReport") -> str:
    heads = ("kind", "inputs", "worst MAE", "worst MRE", "largest difference", "rounding MRE")
    lines = ["{:<10}{:>7}{:>12}{:>12}{:>20}{:>14}".format(*heads)]
    for kind, inputs in report.by_kind().items():
        worst = [_worst(inputs, error) for error in ("mae", "mre", "max_difference", "rounding_mre")]
        lines.append("{:<10}{:>7}{:>12.2e}{:>12.2e}{:>20.2e}{:>14.2e}".format(kind, len(inputs), *worst))
    for one in report.failing[:NAMED_FAILURES]:
        shown = f" images {one.images}" * bool(one.images) + f" videos {one.videos}" * bool(one.videos)
        lines.append(
            f"above the bound: input {one.number} of seed {report.seed} ({one.kind}, {one.num_tokens} tokens{shown}): "
            f"MAE {one.mae:.2e}, MRE {one.mre:.2e}"
        )
    if len(report.failing) > NAMED_FAILURES:
        lines.append(f"... and {len(report.failing) - NAMED_FAILURES} more inputs")
    return "\n".join(lines)


def _plain(row: "CheckRow") -> dict[str, Any]:
    """JSON values; operators that could not run have None instead of NaN, which JSON does not have."""
    document = asdict(row) | {"holds": row.holds}
    for comparison in document["comparisons"].values():
        if comparison["reason"]:
            comparison["forward"] = None
    return document
