# SPDX-License-Identifier: Apache-2.0
"""The directory of a run -> the figures of `mindvl report`: sums and means over its reports, and its card.

Comes before pages/run.py and the command's table and JSON. Reads text files alone, so it works beside a run that is
still going.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from mindvl_cli.failures import CliError

# In the order in which they are stacked: work first, then what is lost.
SPLIT_PARTS = (
    "vision",
    "language",
    "optimizer",
    "host",
    "data_wait",
    "vision_imbalance",
    "language_imbalance",
    "pipeline_bubble",
    "exposed_communication",
)
BETWEEN_PROCESSES = ("vision_imbalance", "language_imbalance", "pipeline_bubble", "exposed_communication")
WORK = ("vision", "language")  # what a step is for; all else would best be zero

State = Literal["finished", "stopped", "unfinished"]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Contents of the directory of a run."""

    directory: Path
    lines: tuple[dict[str, Any], ...]  # one for each report, oldest first; at least one
    card: dict[str, Any]  # run.json; empty for a run of an older version
    result: dict[str, Any]  # result.json; empty while the run is in progress, or after it was killed
    skipped: tuple[dict[str, Any], ...]  # skipped steps
    validations: tuple[dict[str, Any], ...] = ()  # one for each validation, oldest first


def read_run(directory: Path) -> RunRecord:
    """Read what there is.

    Raises:
        CliError: The directory is no run, or has not reported yet.
    """
    path = directory / "metrics.jsonl"
    if not path.is_file():
        raise CliError(
            f"{directory}: has no metrics.jsonl. Give the `out` directory of a run that has started training."
        )
    lines = _whole_lines(path)
    if not lines:
        raise CliError(
            f"{path}: is empty. Wait for the first metrics.every_steps steps, or read {directory / 'logs'} if the run has "
            "ended."
        )
    skipped, validations = directory / "skipped.jsonl", directory / "validation.jsonl"
    return RunRecord(
        directory=directory,
        lines=tuple(lines),
        card=_json(directory / "run.json"),
        result=_json(directory / "result.json"),
        skipped=tuple(_whole_lines(skipped)) if skipped.is_file() else (),
        validations=tuple(_whole_lines(validations)) if validations.is_file() else (),
    )


def run_figures(run: RunRecord) -> dict[str, Any]:
    """What the command prints as JSON, and the page as tiles and tables."""
    last, steady = run.lines[-1], steady_lines(run)
    since = [line["since_last"] for line in run.lines if "since_last" in line]
    samples, sample_tokens = (sum(one[name] for one in since) for name in ("samples", "sample_tokens"))
    figures: dict[str, Any] = {
        "run": str(run.directory),
        "state": state_of(run),
        "step": last["step"],
        "steps": run.card.get("schedule", {}).get("steps"),
        "loss": next((line["loss"] for line in reversed(run.lines) if line["loss"] is not None), None),
        "loss_by_source": last.get("loss_by_source", {}),
        "loss_by_modality": last.get("loss_by_modality", {}),
        "tokens": last["tokens"],
        "loss_tokens": last["loss_tokens"],
        "samples": samples,
        "average_tokens_per_sample": sample_tokens / samples if samples else None,
        "visual_tokens": sum(one["visual_tokens"] for one in since),
        "tflop": sum(one["tflop"] for one in since),
        "tokens_per_s": median(line["tokens_per_s"] for line in steady),
        "samples_per_s": _median(steady, "samples_per_s"),
        "seconds_per_step": median(line["seconds_per_step"] for line in steady),
        "tflops_per_device": _median(steady, "tflops_per_device"),
        "mfu": _median(steady, "mfu"),
        "packing_efficiency": _packing_efficiency(run, sample_tokens, since),
        "memory_peak_gb": max((line["memory_peak_gb"] for line in run.lines if "memory_peak_gb" in line), default=None),
        "skipped_steps": last.get("skipped_steps", 0),
        "imbalance": {
            name: fmean(line["imbalance"][name] for line in steady if name in line.get("imbalance", {}))
            for name in ("vision", "language")
            if any(name in line.get("imbalance", {}) for line in steady)
        },
        "sources": _sources(run),
        "validation": validation_figures(run),
        "step_split": mean_split(splits(steady, run.card)),
        "card": run.card,
    }
    return figures


def validation_figures(run: RunRecord) -> dict[str, Any] | None:
    """The last validation and the best one, without generations; None if there is none."""
    if not run.validations:
        return None
    best = next((one for one in reversed(run.validations) if one["is_best"]), None)

    def numbers(one: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in one.items() if name != "generations"}

    return {"last": numbers(run.validations[-1]), "best": None if best is None else numbers(best)}


def steady_lines(run: RunRecord) -> tuple[dict[str, Any], ...]:
    """The reports that speed is judged by: of the run's last start, whose layout its card tells, but for the first one.

    The first report after a start holds what happens once.
    """
    since_start = tuple(line for line in run.lines if line["step"] > run.card.get("start_step", 0))
    return since_start[1:] or since_start or run.lines


def state_of(run: RunRecord) -> State:
    """finished or stopped as its result says; unfinished when it is still going, or was killed."""
    if run.result.get("step") != run.lines[-1]["step"]:
        return "unfinished"
    return "finished" if run.result["finished"] else "stopped"


def splits(lines: Sequence[dict[str, Any]], card: dict[str, Any]) -> list[dict[str, float]]:
    """The measured seconds of a step by part, of each report that has them.

    In a run of one process nothing is sent and no rank waits for another: what its collectives take is host time.
    """
    found = [line["step_split"] for line in lines if "step_split" in line]
    if card.get("hardware", {}).get("count") != 1:
        return [{name: split[name] for name in SPLIT_PARTS} for split in found]
    return [
        {name: split[name] for name in SPLIT_PARTS if name not in BETWEEN_PROCESSES}
        | {"host": split["host"] + sum(split[name] for name in BETWEEN_PROCESSES)}
        for split in found
    ]


def mean_split(measured: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Of each part of `splits`: mean seconds, share of the step, and how much faster steps were without it.

    The gain is an upper bound: what is taken away may have hidden something else.
    """
    if not measured:
        return {}
    seconds = {name: fmean(split[name] for split in measured) for name in measured[0]}
    total = sum(seconds.values())
    return {
        name: {"seconds": value, "share": value / total, "gain_if_zero": total / max(total - value, 1e-9) - 1}
        for name, value in seconds.items()
    }


def gain(name: str, part: dict[str, float]) -> str:
    """Speedup of a step without this part of mean_split; empty for the work itself."""
    return "" if name in WORK else f"+{100 * part['gain_if_zero']:.1f} %"


def _packing_efficiency(run: RunRecord, sample_tokens: int, since: list[dict[str, Any]]) -> float | None:
    packs = sum(one["packs"] for one in since)
    seq_length = run.card.get("data", {}).get("seq_length")
    return sample_tokens / (packs * seq_length) if packs and seq_length else None


def _sources(run: RunRecord) -> list[dict[str, Any]]:
    """Each source with the share that was asked and the share of tokens that came, most tokens first."""
    tokens: dict[str, int] = {}
    for line in run.lines:
        for name, count in line.get("tokens_by_source", {}).items():
            tokens[name] = tokens.get(name, 0) + count
    asked = {one["name"]: one["share_asked"] for one in run.card.get("data", {}).get("sources", [])}
    total = max(1, sum(tokens.values()))
    losses = run.lines[-1].get("loss_by_source", {})
    return [
        {
            "name": name,
            "share_asked": asked.get(name),
            "tokens": tokens.get(name, 0),
            "share_of_tokens": tokens.get(name, 0) / total,
            "loss": losses.get(name),
        }
        for name in sorted(asked.keys() | tokens.keys(), key=lambda name: (-tokens.get(name, 0), name))
    ]


def _median(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if name in line]
    return median(values) if values else None


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """As mindvl_train.metrics.sinks.read_metrics, without torch: a last line that is being written is left out."""
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _json(path: Path) -> dict[str, Any]:
    """A file that is written whole or not at all; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CliError(f"{path}: is not valid JSON ({error}). Remove it; the report does not need it.") from None
    return found
