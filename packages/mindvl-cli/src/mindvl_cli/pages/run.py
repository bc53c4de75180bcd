# SPDX-License-Identifier: Apache-2.0
"""The page of `mindvl report`: curves of a run, where the time of its steps went, and its card.

Comes after run_figures.py, whose figures it shows.
"""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from mindvl_cli.pages.charts import legend, line_chart, lines_chart, shaded_grid, stacked_areas
from mindvl_cli.pages.page import page, section, table, tile
from mindvl_cli.run_figures import SPLIT_PARTS, RunRecord, gain

MOST_CURVES = 10  # of sources in one chart, the largest ones; the table has all of them
MOST_COLUMNS = 60  # of the load of experts

Line = dict[str, Any]


def run_page(run: RunRecord, figures: dict[str, Any]) -> str:
    """A whole document."""
    lines = run.lines
    largest = [source["name"] for source in figures["sources"] if source["tokens"]][:MOST_CURVES]
    loss = [
        _one("all loss tokens", lines, lambda line: line["loss"]),
        _several("by source", lines, "loss_by_source", largest),
        _several("by modality", lines, "loss_by_modality"),
        _several("of tokens further ahead", lines, "mtp_loss", name_of=lambda depth: f"{depth} further"),
    ]
    update = [
        _one("learning rate, in millionths", lines, lambda line: 1e6 * line["learning_rate"]),
        _one("gradient norm", lines, lambda line: line["grad_norm"]),
        _several("gradient norm by part", lines, "grad_norm_by_part"),
    ]
    speed = [
        _one("tokens/s", lines, lambda line: line["tokens_per_s"]),
        _one("MFU", lines, lambda line: line.get("mfu")),
        _one("TFLOP/s of a device", lines, lambda line: line.get("tflops_per_device")),
        _one("packing efficiency", lines, lambda line: line.get("packing_efficiency")),
        _several("busiest rank over the mean one", lines, "imbalance"),
        _one("memory, GB", lines, lambda line: line.get("memory_gb")),
    ]
    name = run.directory.resolve().name
    body = [
        _header(name, figures),
        section("Loss", _figures(loss)),
        section("Update", _figures(update)),
        section("Speed", _figures(speed)),
        section("Where the time of a step goes", _split(lines, figures), lead=_SPLIT_LEAD),
        section("Experts", _experts(lines), lead="Load of the busiest expert over the mean load, by layer and step."),
        section("Data", _sources(figures)),
        section("Left out", _skipped(run)),
        section("Run card", _card(figures)),
    ]
    return page(f"Run {name}", "".join(body))


_SPLIT_LEAD = (
    "Of the last step before each report, seconds averaged over ranks. Vision and language are the work itself; the "
    "gain is how much faster steps were if a part took no time, an upper bound."
)


def _header(name: str, figures: dict[str, Any]) -> str:
    of_steps = "" if figures["steps"] is None else f" of {figures['steps']:,}"
    average = figures["average_tokens_per_sample"]
    mfu, tflops = figures["mfu"], figures["tflops_per_device"]
    fast = f"{tflops:.3g} TFLOP/s a device" if tflops is not None else "median"
    tiles = [
        tile("none" if figures["loss"] is None else f"{figures['loss']:.3f}", "loss", "last report"),
        tile(_short(figures["tokens"]), "tokens", f"{_short(figures['loss_tokens'])} learned"),
        tile(f"{figures['tokens_per_s']:,.0f}", "tokens/s", fast),
        tile(f"{figures['seconds_per_step']:.3g} s", "a step", "median of the last start"),
    ]
    if mfu is not None:
        tiles.append(tile(f"{100 * mfu:.1f} %", "MFU", "median"))
    if average is not None:
        tiles.append(tile(f"{average:,.0f}", "tokens in a sample", f"mean of {figures['samples']:,}"))
    if figures["packing_efficiency"] is not None:
        tiles.append(tile(f"{100 * figures['packing_efficiency']:.1f} %", "packing efficiency", "the rest is padding"))
    state = f"{figures['state'].capitalize()}, step {figures['step']:,}{of_steps}."
    return f'<header><h1>Run {escape(name)}</h1><p>{state}</p><div class="tiles">{"".join(tiles)}</div></header>'


def _one(title: str, lines: Sequence[Line], value: Callable[[Line], float | None]) -> str:
    points = [(float(line["step"]), found) for line in lines if (found := value(line)) is not None]
    return _figure(title, line_chart(points, x_label="step", describe=title)) if points else ""


def _several(
    title: str,
    lines: Sequence[Line],
    group: str,
    names: Sequence[str] | None = None,
    name_of: Callable[[str], str] = lambda name: name,
) -> str:
    """The members of a group of numbers, or those of these names."""
    if names is None:
        names = list(dict.fromkeys(name for line in lines for name in line.get(group, {})))
    curves = [
        (name_of(name), [(float(line["step"]), line[group][name]) for line in lines if name in line.get(group, {})])
        for name in names
    ]
    if not any(points for _, points in curves):
        return ""
    return _figure(title, lines_chart(curves, x_label="step", describe=title) + legend([name for name, _ in curves]))


def _figure(title: str, chart: str) -> str:
    return f"<figure><figcaption><b>{escape(title)}</b></figcaption>{chart}</figure>"


def _figures(figures: Sequence[str]) -> str:
    drawn = "".join(figures)
    return f'<div class="curves">{drawn}</div>' if drawn else ""


def _split(lines: Sequence[Line], figures: dict[str, Any]) -> str:
    split = figures["step_split"]
    if not split:
        return ""
    measured = [line for line in lines if "step_split" in line]
    areas = stacked_areas(
        [float(line["step"]) for line in measured],
        [(name, [line["step_split"][name] for line in measured]) for name in SPLIT_PARTS],
        x_label="step",
        describe="Seconds of a step by part",
    )
    packs = [
        (_words(name), f"{1000 * part['seconds']:,.1f}", f"{100 * part['share']:.1f} %", gain(name, part))
        for name, part in split.items()
    ]
    names = legend([_words(name) for name in SPLIT_PARTS])
    return f"<figure>{areas}{names}</figure>{table(['part', 'ms', 'share', 'gain if zero'], packs)}"


def _experts(lines: Sequence[Line]) -> str:
    told = [line for line in lines if "routers" in line]
    if not told:
        return ""
    stride = max(1, -(-len(told) // MOST_COLUMNS))
    shown = told[::-1][::stride][::-1]  # the last report is always among them
    layers = list(shown[-1]["routers"]["load"])
    grid = shaded_grid(
        layers,
        [str(line["step"]) for line in shown],
        [[line["routers"]["load"].get(layer, 0.0) for line in shown] for layer in layers],
        low=1.0,
        row_title="layer",
        column_title="step",
        describe="Load of the busiest expert by layer and step",
    )
    last = shown[-1]["routers"]
    names = [name for name in ("load", "entropy", "bias_low", "bias_high", "aux_loss") if name in last]
    packs = [(layer, *(f"{last[name][layer]:.4g}" for name in names)) for layer in layers]
    last_report = table(["layer", *map(_words, names)], packs)
    return f"<figure>{grid}</figure><details><summary>Last report by layer</summary>{last_report}</details>"


def _sources(figures: dict[str, Any]) -> str:
    packs = [
        (
            source["name"],
            "-" if source["share_asked"] is None else f"{100 * source['share_asked']:.2f} %",
            f"{source['tokens']:,}",
            f"{100 * source['share_of_tokens']:.2f} %",
            "-" if source["loss"] is None else f"{source['loss']:.4f}",
        )
        for source in figures["sources"]
    ]
    return table(["source", "asked", "tokens", "of all tokens", "last loss"], packs) if packs else ""


def _skipped(run: RunRecord) -> str:
    packs = [(str(step["step"]), str(step.get("why", "")), str(step.get("grad_norm", ""))) for step in run.skipped]
    return table(["step", "why", "gradient norm"], packs) if packs else ""


def _card(figures: dict[str, Any]) -> str:
    """What stands in run.json, group by group; nothing for a run of an older version."""
    card = figures["card"]
    if not card:
        return ""
    sizes = card["parameters"]
    facts = {
        "phase": card["phase"],
        "trained": ", ".join(card["trained_parts"]),
        "frozen": ", ".join(card["frozen_parts"]) or "nothing",
        "parameters": f"{sizes['total']:,}: "
        + ", ".join(f"{n} {sizes[n]:,}" for n in ("vision", "projector", "language")),
        "trained parameters": f"{sizes['trained']:,}",
        "for one token": f"{sizes['language_for_one_token']:,} of the language model",
        "samples": f"{figures['samples']:,}, {figures['visual_tokens']:,} visual tokens",
        "FLOPs": f"{figures['tflop']:.4g} TFLOP so far",
        "formula": card["flops"]["formula"],
        "peak used": _peak(card["hardware"]),
        "hardware": f"{card['hardware']['count']} x {card['hardware']['device']}, {card['hardware']['platform']}",
        "precision": card["precision"],
        "layout": _pairs(card["layout"]),
        "schedule": _pairs(card["schedule"]),
        "optimizer": _pairs(card["optimizer"]),
        "packs": f"{card['data']['seq_length']:,} tokens; images {_pairs(card['data']['image'])}",
        "seeds": _pairs(card["seeds"]),
        "weights from": _pairs({name: path for name, path in card["init"].items() if path}) or "random",
        "started": f"{card['started_at']} at step {card['start_step']}",
        "versions": _pairs(card["versions"]),
        "commit": card["commit"] or "not a git checkout",
    }
    packs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    return f"<dl>{packs}</dl>"


def _peak(hardware: dict[str, Any]) -> str:
    peak = hardware["peak_tflops"]
    source = hardware["peak_source"]
    return source if peak is None else f"{peak:g} TFLOP/s a device in bf16 ({source})"


def _pairs(values: dict[str, Any]) -> str:
    """name value, name value; what is not set is left out."""
    pieces = []
    for name, value in values.items():
        if isinstance(value, dict):
            value = f"({_pairs(value)})"
        if value is not None and value != "()":
            pieces.append(f"{_words(name)} {value}")
    return ", ".join(pieces)


def _short(count: int) -> str:
    """Three digits and a letter."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)


def _words(name: str) -> str:
    return name.replace("_", " ")
