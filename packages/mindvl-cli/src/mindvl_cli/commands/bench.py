# SPDX-License-Identifier: Apache-2.0
"""`mindvl bench`: run a benchmark of a package and compare its figures with baselines.

The benchmarks are scripts of a checkout, not part of an installed package; each runs in its own process, on one core,
and prints JSON. docs/design/evidence/loader.md describes them, docs/design/operators.md those of the operators,
docs/design/evidence/alignment.md the step.
"""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mindvl_cli import machine
from mindvl_cli.commands.options import AS_JSON
from mindvl_cli.failures import CliError

NAMES = {  # script name -> package
    "packing": "mindvl_data",
    "loader": "mindvl_data",
    "scale": "mindvl_data",
    "curation": "mindvl_data",
    "duplicates": "mindvl_data",
    "planted": "mindvl_data",
    "ops": "mindvl_ops",
    "step": "mindvl_train",
    "start": "mindvl_train",
    "merge": "mindvl_merge",
    "documents": "mindvl_cli",
}


@click.command(epilog="Example: mindvl bench packing --quick   or   mindvl bench loader")
@click.argument("name", type=click.Choice(list(NAMES)))
@click.option("--quick", is_flag=True, help="Run smaller inputs and fewer rounds; the figures are not reliable.")
@click.option("--full", is_flag=True, help="Measure more sizes and steps, which takes hours; step only.")
@AS_JSON
def bench(name: str, quick: bool, full: bool, as_json: bool) -> None:
    """Measure packing, loader, scale, curation, duplicates, planted, ops, step, start, merge or documents on this machine.

    \b
    packing     packed sequences per second
    loader      images per second per core
    scale       memory and start-up time with many samples
    curation    speed and memory of text rules, compared with data-juicer
    duplicates  time and memory of duplicate search over 10 million signatures
    planted     recall and precision of curation steps on added duplicates,
                garbage and benchmark items
    ops         time and memory of operators
    step        bytes and kernel launches of a layer; step time of a small
                model, compared with transformers and a minimal loop
    start       time of imports, process groups, checkpoint index and initial
                weights of a rank
    merge       processor time and memory of a merge, compared with reading
                and writing the same files
    documents   accuracy of a tiny model after training on curated and on
                uncurated pages of the same PDFs
    """
    if full and (quick or name != "step"):
        raise click.UsageError("--full: only `mindvl bench step` has it, without --quick. Leave it out.")
    report = {"benchmark": name, "quick": quick, "machine": describe_machine()}
    options = [option for option, given in (("--quick", quick), ("--full", full)) if given]
    report |= run_script(benchmarks_directory(NAMES[name]) / f"{name}.py", options)
    if as_json:
        click.echo(json.dumps(report))
    else:
        print_table(report)


def benchmarks_directory(package: str) -> Path:
    """The directory of a package's benchmark scripts, beside its source.

    Raises:
        CliError: The package was not installed from a checkout.
    """
    spec = importlib.util.find_spec(package)  # finds without importing
    source = Path(spec.origin).parent if spec and spec.origin else Path()
    directory = source.parents[1] / "benchmarks" if len(source.parents) > 1 else source
    if not any(directory.glob("*.py")):
        raise CliError(
            f"{source}: the installed {package.replace('_', '-')} does not include the benchmarks. "
            "Run `uv run mindvl bench` in a checkout of the repository."
        )
    return directory


def run_script(script: Path, options: Sequence[str]) -> dict[str, Any]:
    """The JSON that a benchmark prints on standard output; its progress goes to standard error.

    Raises:
        CliError: The benchmark fails.
    """
    command = [sys.executable, str(script), "--json", *options]
    one_core = os.environ | {"OMP_NUM_THREADS": "1"}  # figures are per core
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=one_core)
    if done.returncode:
        raise CliError(f"{script}: the benchmark failed with exit code {done.returncode}. Read its output above.")
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
    """The processor's name; its architecture where the name is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def print_table(report: dict[str, Any]) -> None:
    """Print one line for each figure, then the machine."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("", "figure", "target", "", "compared with", "note"):
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
