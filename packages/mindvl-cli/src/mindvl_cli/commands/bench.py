# SPDX-License-Identifier: Apache-2.0
"""`mindvl bench`: run a benchmark of a package and show its figures beside their rivals.

The benchmarks are scripts of a checkout, not part of an installed package; each runs in a process of its own, on one
core, and prints JSON. docs/design/evidence/loader.md says what they measure,
docs/design/operators.md for those of the operators, docs/design/evidence/alignment.md for the step.
"""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from mindvl_cli import machine
from mindvl_cli.failures import CliError

NAMES = {  # of a script -> its package
    "packing": "mindvl_data",
    "loader": "mindvl_data",
    "scale": "mindvl_data",
    "ops": "mindvl_ops",
    "step": "mindvl_train",
    "start": "mindvl_train",
}


@click.command(epilog="Example: mindvl bench packing --quick   or   mindvl bench loader")
@click.argument("name", type=click.Choice(list(NAMES)))
@click.option("--quick", is_flag=True, help="Smaller inputs and fewer rounds: a look, not a figure to quote.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def bench(name: str, quick: bool, as_json: bool) -> None:
    """Measure packing, loader (images per core), scale (memory, first start), ops (operators), step or start.

    step trains small models beside transformers and beside a bare loop. start measures the imports of a rank.
    """
    report = {"benchmark": name, "quick": quick, "machine": describe_machine()}
    report |= run_script(benchmarks_directory(NAMES[name]) / f"{name}.py", quick=quick)
    if as_json:
        click.echo(json.dumps(report))
    else:
        print_table(report)


def benchmarks_directory(package: str) -> Path:
    """Where the benchmark scripts of a package lie, beside its source.

    Raises:
        CliError: The package was not installed from a checkout.
    """
    spec = importlib.util.find_spec(package)  # finds without importing
    source = Path(spec.origin).parent if spec and spec.origin else Path()
    directory = source.parents[1] / "benchmarks" if len(source.parents) > 1 else source
    if not any(directory.glob("*.py")):
        raise CliError(
            f"the benchmarks are not part of the installed {package.replace('_', '-')}. {source}. "
            "Run `uv run mindvl bench` in a checkout of the repository."
        )
    return directory


def run_script(script: Path, *, quick: bool) -> dict[str, Any]:
    """The JSON that a benchmark prints; what it says meanwhile goes to stderr.

    Raises:
        CliError: The benchmark fails.
    """
    command = [sys.executable, str(script), "--json", *(["--quick"] if quick else [])]
    one_core = os.environ | {"OMP_NUM_THREADS": "1"}  # figures are by core
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=one_core)
    if done.returncode:
        raise CliError(f"benchmark ended with code {done.returncode}. {script}. What it printed above says why.")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def describe_machine() -> dict[str, Any]:
    """Processor, cores and how busy they are before the benchmark begins."""
    return {
        "cpu": cpu_model(),
        "cores": machine.num_cores(),
        "memory_gib": round(machine.memory_bytes() / 2**30, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "versions": machine.versions(),
    }


def cpu_model() -> str:
    """The processor's name; its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def print_table(report: dict[str, Any]) -> None:
    """One line for each figure, then the machine."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("", "figure", "target", "", "beside the rival", "note"):
        table.add_column(title, overflow="fold", justify="right" if title == "figure" else "left")
    for figure in report["figures"]:
        state = {True: "[green]holds[/]", False: "[red]missed[/]", None: ""}[figure["holds"]]
        ratio = f"{figure['ratio']:.2f} x " if figure["ratio"] is not None else ""
        value = f"{figure['value']:,.5g} {figure['unit']}".strip()
        table.add_row(figure["name"], value, figure["target"], state, ratio + figure["rival"], figure["note"])
    Console().print(table)
    found = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    click.echo(
        f"\n{found['cpu']}, {found['cores']} cores, {found['memory_gib']} GiB, load {found['load_before']} before; "
        f"commit {report['commit'] or 'unknown'}; Python {found['versions']['python']}, {versions}"
    )
