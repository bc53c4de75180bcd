# SPDX-License-Identifier: Apache-2.0
"""`mindvl recipe`: show and audit the data mixtures of the paper, and map them to shard directories.

A thin layer over mindvl_data.recipes: options become arguments, results become tables, YAML or JSON.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.commands.options import AS_JSON, count_option
from mindvl_cli.whole_file import write_whole

if TYPE_CHECKING:
    from mindvl_data.recipes import Finding, Recipe

PIPE_WIDTH = 120  # columns of a table that is not shown on a terminal


@click.group()
def recipe() -> None:
    """Show and audit the paper's data mixtures, and map them to shards.

    The NAME of `show` and `audit` is a data mixture of the paper, not a training recipe; `mindvl recipe list` lists the names.
    """


@recipe.command("list")
@AS_JSON
def list_(as_json: bool) -> None:
    """List every data mixture with its sources and samples.

    Example: mindvl recipe list
    """
    from mindvl_data.recipes import list_recipes, load_recipe

    rows = [_summary(load_recipe(name)) for name in list_recipes()]
    if as_json:
        click.echo(json.dumps({"recipes": rows}))
        return
    lines = [(row["name"], f"{row['sources']:,}", f"{row['samples']:,}", row["title"]) for row in rows]
    _print_table(["recipe", ">sources", ">samples", "what"], lines)


@recipe.command(short_help="Show the shares and tokens of a data mixture.")
@click.argument("name")
@count_option("--top", default=10, help="Number of sources to show, largest first.")
@click.option("--all", "show_all", is_flag=True, help="Show all sources.")
@click.option(
    "--map",
    "map_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML file that maps each source name of the paper to its shard directory.",
)
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory with one shard directory per source, named like general-qa for General QA.",
)
@click.option("--renormalize", is_flag=True, help="Allow missing sources; the others keep their relative shares.")
@click.option(
    "--samples",
    "counts",
    multiple=True,
    metavar="NAME=COUNT",
    help="Number of samples to use for a source; may be repeated.",
)
@click.option("--out", type=click.Path(path_type=Path), help="New YAML file for the mapped sources.")
@AS_JSON
def show(
    name: str,
    top: int,
    show_all: bool,
    map_file: Path | None,
    root: Path | None,
    renormalize: bool,
    counts: tuple[str, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Show the shares and tokens of NAME, a data mixture of the paper, not a training recipe.

    With --map or --root, print a `sources` list for the data section of a training recipe instead.

    Example: mindvl recipe show sft --root shards/ --renormalize --out data.yaml
    """
    from mindvl_data.recipes import load_recipe, with_samples

    if map_file and root:
        raise click.UsageError("--map: cannot be combined with --root. Remove one of the two.")
    shown = with_samples(load_recipe(name), _parse_counts(counts))
    if map_file or root:
        _show_mapped(shown, map_file, root, renormalize, out, as_json)
    elif renormalize or out:
        raise click.UsageError("--renormalize, --out: need --map or --root. Add one of the two.")
    elif as_json:
        click.echo(json.dumps(_document(shown)))
    else:
        _print_recipe(shown, None if show_all else top)


@recipe.command(short_help="Check the paper's mixture tables for arithmetic errors.")
@click.argument("name", required=False)
@AS_JSON
def audit(name: str | None, as_json: bool) -> None:
    """Recompute every figure that the paper prints about data mixture NAME, and print the discrepancies.

    NAME is a data mixture of the paper, not a training recipe. Without NAME, all data mixtures are audited.

    Example: mindvl recipe audit warmup
    """
    from mindvl_data.recipes import list_recipes, load_recipe, recompute, recompute_tokens

    recipes = [load_recipe(known) for known in ([name] if name else list_recipes())]
    figures = {one.name: recompute(one) for one in recipes}
    if name is None:
        figures["training"] = recompute_tokens(recipes)
    if as_json:
        click.echo(json.dumps({"audits": [_audit_document(key, found) for key, found in figures.items()]}))
        return
    for key, found in figures.items():
        _print_audit(key, found)


def _parse_counts(texts: Sequence[str]) -> dict[str, int]:
    counts = {}
    for text in texts:
        name, _, count = text.rpartition("=")
        if not name or not (count.isascii() and count.isdigit()):
            raise click.BadParameter(
                f"{text!r} is not NAME=COUNT. Write for example laion=1000.", param_hint="--samples"
            )
        counts[name] = int(count)
    return counts


def _show_mapped(
    shown: "Recipe", map_file: Path | None, root: Path | None, renormalize: bool, out: Path | None, as_json: bool
) -> None:
    from mindvl_cli.load import load_config, to_yaml
    from mindvl_data.recipes import find_directories, map_recipe

    mapping = load_config(map_file, dict[str, str]) if map_file else find_directories(shown, Path(str(root)))
    sources, missing = map_recipe(shown, mapping, renormalize=renormalize)
    rows = [{"name": source.name, "path": str(source.path), "weight": source.weight} for source in sources]
    text = to_yaml({"data": {"sources": rows}})
    if out is not None:
        _write_new(out, text)
        click.echo(f"{len(sources)} of {len(shown.sources)} sources in {out}", err=True)
    if as_json:
        click.echo(json.dumps({"recipe": shown.name, "sources": rows, "missing": missing}))
    elif out is None:
        click.echo(text, nl=False)
    directories = {source.name: source.directory for source in shown.sources}
    for name in missing:
        click.echo(f"missing: {name} (directory {directories[name]})", err=True)
    if root is not None:
        used = {Path(str(source.path)).name for source in sources}
        for other in sorted(path.name for path in root.iterdir() if path.is_dir() and path.name not in used):
            click.echo(f"not in the data mixture: directory {other}", err=True)


def _write_new(path: Path, text: str) -> None:
    from mindvl_cli.failures import CliError

    if path.exists():
        raise CliError(f"--out: {path} exists. Name another file, or remove it.")
    write_whole(path, text)


def _summary(shown: "Recipe") -> dict[str, Any]:
    return {"name": shown.name, "title": shown.title, "sources": len(shown.sources), "samples": shown.samples}


def _document(shown: "Recipe") -> dict[str, Any]:
    """All data of a mixture; shares are of all its samples, `printed_percent` is of the total of its table."""
    budgets = [
        {
            "model": budget.model,
            "category": budget.category,
            "tokens": int(budget.tokens),
            "where": budget.where,
            "tokens_per_sample": shown.tokens_per_sample(budget),
            "steps": {str(length): shown.steps(budget, length) for length in shown.seq_lengths},
        }
        for budget in shown.budgets
    ]
    sources = [
        {
            "name": source.name,
            "category": source.category,
            "directory": source.directory,
            "samples": source.samples,
            "share": None if source.samples is None else source.samples / shown.samples,
            "printed_percent": None if source.percent is None else str(source.percent),
        }
        for source in shown.sources
    ]
    categories = [
        {"name": name, "samples": samples, "share": samples / shown.samples}
        for name, samples in shown.categories.items()
    ]
    return _summary(shown) | {
        "where": shown.where,
        "seq_lengths": shown.seq_lengths,
        "batch_size": shown.batch_size,
        "budgets": budgets,
        "categories": categories,
        "notes": shown.notes,
        "sources": sources,
    }


def _print_recipe(shown: "Recipe", top: int | None) -> None:
    click.echo(f"{shown.title}\n{shown.samples:,} samples of {len(shown.sources)} sources; {shown.where}\n")
    document = _document(shown)
    budgets = [
        (
            budget["model"] if budget["category"] is None else f"{budget['model']}, {budget['category']}",
            f"{budget['tokens'] / 1e9:,.0f} B",
            "-" if budget["tokens_per_sample"] is None else f"{budget['tokens_per_sample']:,.0f}",
            ", ".join(f"{steps:,} at {length}" for length, steps in budget["steps"].items()),
        )
        for budget in document["budgets"]
    ]
    _print_table(["model", ">tokens", ">per sample", f"steps of {shown.batch_size} packs, by sequence length"], budgets)
    categories = [(row["name"], _count(row["samples"]), _percent(row["share"])) for row in document["categories"]]
    _print_table(["category", ">samples", ">share"], categories)
    rows = document["sources"] if top is None else sorted(document["sources"], key=lambda row: -(row["samples"] or 0))
    sources = [
        (row["name"], row["category"], _count(row["samples"]), _percent(row["share"]), row["printed_percent"] or "-")
        for row in rows[:top]
    ]
    _print_table(["source", "category", ">samples", ">share", ">printed %"], sources)
    if len(rows) > len(sources):
        click.echo(f"{len(rows) - len(sources)} more sources: --all shows all, in the order of the paper.")
    for note in shown.notes:
        click.echo(f"note: {note}")


def _count(samples: int | None) -> str:
    return f"{samples:,}" if samples else "-"


def _percent(share: float | None) -> str:
    return f"{100 * share:.4f} %" if share else "-"


def _audit_document(name: str, figures: "list[Finding]") -> dict[str, Any]:
    findings = [
        {
            "kind": finding.kind,
            "what": finding.what,
            "printed": f"{finding.printed:f}",
            "recomputed": f"{finding.recomputed:f}",
            "difference": f"{finding.difference:f}",
            "last_digit_only": finding.last_digit_only,
            "where": finding.where,
            "note": finding.note,
        }
        for finding in figures
        if not finding.adds_up
    ]
    return {"recipe": name, "figures": len(figures), "findings": findings}


def _print_audit(name: str, figures: "list[Finding]") -> None:
    findings = [finding for finding in figures if not finding.adds_up]
    slips = sum(finding.last_digit_only for finding in findings)
    tail = f", {slips} of them by one in the last digit only" if slips else ""
    click.echo(f"{name}: {len(findings)} of {len(figures)} printed figures do not add up{tail}.")
    for where in dict.fromkeys(finding.where for finding in findings):
        lines = [
            (one.what, f"{one.printed:,f}", f"{one.recomputed:,f}", f"{one.difference:+,f}")
            for one in findings
            if one.where == where
        ]
        _print_table([where, ">printed", ">recomputed", ">printed too much"], lines)
    for finding in findings:
        if finding.note:
            click.echo(f"note on {finding.what}:\n  {finding.note}.")
    if findings:
        click.echo()


def _print_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print columns; a heading that starts with ">" aligns its column to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head.removeprefix(">"), justify="right" if head.startswith(">") else "left", overflow="fold")
    for line in lines:
        table.add_row(*line)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=PIPE_WIDTH)
    console.print(table)
    console.print()
