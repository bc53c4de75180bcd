# SPDX-License-Identifier: Apache-2.0
"""The page of `mindvl report`: curves of a run, the parts of its step time, and its card.

Comes after run_figures.py, whose figures it shows.
"""

from collections.abc import Callable, Sequence
from typing import Any

from mindvl_cli.pages.plots import Plot, areas, heat_map, line, lines
from mindvl_cli.pages.render import render, share_text, words
from mindvl_cli.run_figures import RunRecord, gain, splits

MOST_CURVES = 10  # of sources in one plot, the largest ones; the table has all of them
_NATS = "nats per token"
MOST_COLUMNS = 60  # of the load of experts

Line = dict[str, Any]


def run_page(run: RunRecord, figures: dict[str, Any]) -> str:
    """The page as HTML."""
    reports = run.lines
    largest = [source["name"] for source in figures["sources"] if source["tokens"]][:MOST_CURVES]
    loss = [
        _one("Loss of all loss tokens", reports, lambda report: report["loss"], _NATS),
        _several("Loss by source", reports, "loss_by_source", largest, unit=_NATS),
        _several("Loss by modality", reports, "loss_by_modality", unit=_NATS),
        _several(
            "Loss of tokens further ahead", reports, "mtp_loss", name_of=lambda depth: f"{depth} further", unit=_NATS
        ),
    ]
    update = [
        _one("Learning rate", reports, lambda report: report["learning_rate"], "per update"),
        _several("Learning rate by part", reports, "learning_rate_by_part", unit="per update"),
        _one("Gradient norm", reports, lambda report: report["grad_norm"], "L2 norm, before clipping"),
        _several("Gradient norm by part", reports, "grad_norm_by_part", unit="L2 norm, before clipping"),
    ]
    speed = [
        _one("Throughput", reports, lambda report: report["tokens_per_s"], "tokens/s"),
        _one("MFU", reports, lambda report: report.get("mfu"), "share of peak FLOP/s"),
        _one("Model FLOPs per device", reports, lambda report: report.get("tflops_per_device"), "TFLOP/s"),
        _one("Packing efficiency", reports, lambda report: report.get("packing_efficiency"), "share of positions"),
        _several("Load of the busiest rank", reports, "imbalance", unit="times the mean"),
        _one("Device memory", reports, lambda report: report.get("memory_gb"), "GB"),
    ]
    return render(
        "run",
        name=run.directory.resolve().name,
        f=figures,
        **{
            name: [plot for plot in plots if plot]
            for name, plots in (("loss", loss), ("update", update), ("speed", speed))
        },
        **_validation(run),
        **_split(run, figures["step_split"]),
        **_experts(reports),
        source_rows=[
            (
                source["name"],
                share_text(source["share_asked"]),
                f"{source['tokens']:,}",
                share_text(source["share_of_tokens"]),
                "-" if source["loss"] is None else f"{source['loss']:.4f}",
            )
            for source in figures["sources"]
        ],
        skipped_rows=[(step["step"], step.get("why", ""), step.get("grad_norm", "")) for step in run.skipped],
    )


def _one(title: str, reports: Sequence[Line], value: Callable[[Line], float | None], unit: str) -> Plot | None:
    points = [(float(report["step"]), found) for report in reports if (found := value(report)) is not None]
    return line(points, x_label="step", y_label=unit, describe=title) if points else None


def _several(
    title: str,
    reports: Sequence[Line],
    group: str,
    names: Sequence[str] | None = None,
    name_of: Callable[[str], str] = lambda name: name,
    *,
    unit: str,
) -> Plot | None:
    """The members of a group of numbers, or those with these names."""
    if names is None:
        names = list(dict.fromkeys(name for report in reports for name in report.get(group, {})))
    curves = [
        (name_of(name), [(float(one["step"]), one[group][name]) for one in reports if name in one.get(group, {})])
        for name in names
    ]
    drawn = any(points for _, points in curves)
    return lines(curves, x_label="step", y_label=unit, describe=title) if drawn else None


def _validation(run: RunRecord) -> dict[str, Any]:
    """Points of every validation, the best step with a star, and the answers of the last validation that has some."""
    found = run.validations
    if not found:
        return {"validation": [], "generations": None}
    best = next((float(one["step"]) for one in reversed(found) if one["is_best"]), float(found[-1]["step"]))

    def plot(title: str, name: str, unit: str) -> Plot:
        sources = list(dict.fromkeys(source for one in found for source in one[f"{name}_by_source"]))[:MOST_CURVES]
        curves = [("all sources", [(float(one["step"]), one[name]) for one in found if one[name] is not None])]
        for source in sources if len(sources) > 1 else ():
            members = [(one["step"], one[f"{name}_by_source"]) for one in found]
            curves.append((source, [(float(step), group[source]) for step, group in members if source in group]))
        return lines(curves, x_label="step", y_label=unit, describe=title, star=best)

    plots = [
        plot(f"Validation loss; the star is the best step, {best:,.0f}", "loss", _NATS),
        plot(
            "Validation: share of loss tokens that are the most likely token", "token_accuracy", "share of loss tokens"
        ),
    ]
    answers = next((one for one in reversed(found) if one.get("generations")), None)
    generations = None
    if answers is not None:
        rows = [(one["name"], one["prompt"], one["answer"], one["expected"] or "") for one in answers["generations"]]
        generations = {"step": answers["step"], "rows": rows}
    return {"validation": plots, "generations": generations}


def _split(run: RunRecord, split: dict[str, dict[str, float]]) -> dict[str, Any]:
    if not split:
        return {"split": None}
    measured = splits(run.lines, run.card)
    layers = [(words(name), [one[name] for one in measured]) for name in split]
    steps = [float(report["step"]) for report in run.lines if "step_split" in report]
    return {
        "split": areas(steps, layers, x_label="step", y_label="s", describe="Seconds of a step by part"),
        "split_rows": [
            (words(name), f"{1000 * part['seconds']:,.1f}", f"{part['share']:.1%}", gain(name, part))
            for name, part in split.items()
        ],
    }


def _experts(reports: Sequence[Line]) -> dict[str, Any]:
    known = [report for report in reports if "routers" in report]
    if not known:
        return {"experts": None}
    stride = -(-len(known) // MOST_COLUMNS)
    shown = known[::-1][::stride][::-1]  # the last report is always among them
    last = shown[-1]["routers"]
    layers = list(last["load"])
    names = [name for name in ("load", "entropy", "bias_low", "bias_high", "aux_loss") if name in last]
    return {
        "experts": heat_map(
            layers,
            [str(report["step"]) for report in shown],
            [[report["routers"]["load"].get(layer, 0.0) for report in shown] for layer in layers],
            row_label="layer",
            column_label="step",
            describe="Load of the busiest expert by layer and step",
            value_format=".2f",
            low=1.0,
        ),
        "expert_head": ["layer", *map(words, names)],
        "expert_rows": [(layer, *(f"{last[name][layer]:.4g}" for name in names)) for layer in layers],
    }
