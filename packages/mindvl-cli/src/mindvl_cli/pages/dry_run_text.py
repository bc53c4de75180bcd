# SPDX-License-Identifier: Apache-2.0
"""The output of `mindvl train --dry-run`: the runs of a recipe or a pipeline file as text or JSON.

Comes after mindvl_train.dry_run, which computes the reports that are formatted here.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.machine import num_cores
from mindvl_cli.units import bytes_text, count_text

if TYPE_CHECKING:
    from mindvl_train.dry_run import DryRun, StageCounts
    from mindvl_train.phases import Stage


def show_dry_run(stages: "Sequence[Stage]", num_processes: int | None, *, as_json: bool) -> bool:
    """Print what each stage would do; returns whether it could start here and now."""
    from mindvl_train.dry_run import dry_run

    reports = {
        stage.name: dry_run(stage.config, num_processes=num_processes, from_stage=stage.start_from) for stage in stages
    }
    startable = not any(report.problems for report in reports.values())
    if as_json:
        documents = [{"name": name} | report.as_dict() for name, report in reports.items()]
        click.echo(json.dumps({"ok": startable, "stages": documents}))
    else:
        click.echo("\n\n".join(dry_run_text(name, report) for name, report in reports.items()))
    return startable


def dry_run_text(name: str, report: "DryRun") -> str:
    """One run in a few lines, warnings and problems last."""
    lines = [f"{name}: {report.phase} into {report.out}"]
    lines += [f"  {head:<12}{text}" for head, text in _facts(report)]
    lines += [f"  warning     {warning}" for warning in report.warnings]
    lines += [f"  problem     {problem}" for problem in report.problems]
    return "\n".join(lines)


def _facts(report: "DryRun") -> list[tuple[str, str]]:
    model, layout, schedule, saved = report.model, report.layout, report.schedule, report.checkpoints
    trained = sum(model["trained"].values())
    parts = ", ".join(
        f"{part} {count_text(number)}{'' if part in model['trained'] else ' (frozen)'}"
        for part, number in model["parameters"].items()
    )
    learns = f"{count_text(trained)} of {count_text(sum(model['parameters'].values()))}"
    sizes = ("tp", "pp", "cp", "ep", "dp")
    spread = " ".join(f"{size} {layout[f'{size}_size']}" for size in sizes)
    processes = f"{layout['processes']:,} process{'es' if layout['processes'] > 1 else ''}"
    rates = ", ".join(f"{rate:.2g} at step {step:,}" for step, rate in schedule["learning_rate"].items())
    return [
        ("model", f"{model['family']}, {model['precision']}{model['precision_reason']}: {parts}; trained {learns}"),
        ("layout", f"{processes}: {spread}; recompute {layout['recompute']}"),
        ("groups", "; ".join(f"{size} {_ranks(layout['groups_of_rank_0'][size])}" for size in sizes)),
        *(("stages", line) for line in _stages(report.stages, layout["device"])),
        (
            "step",
            f"{schedule['global_batch_size']:,} packs of {schedule['seq_length']:,} tokens, {layout['microbatches']:,} on "
            f"each data-parallel rank; pipeline bubble {layout['pipeline_bubble']:.0%}",
        ),
        ("schedule", f"{schedule['steps']:,} steps, {count_text(schedule['tokens'])} tokens; learning rate {rates}"),
        ("weights", _start(report.start)),
        *([("start", _reads(report.start["reads"]))] if report.start["reads"] else []),
        (
            "saves",
            f"{saved['written']:,} checkpoints of {bytes_text(saved['bytes'])}, up to "
            f"{bytes_text(saved['bytes_at_once'])} at once; {bytes_text(saved['free_bytes'])} free",
        ),
        *([("validation", _validation(report.validation))] if report.validation is not None else []),
        ("operators", _operators(report.operators)),
        *(("rehearsal", line) for line in _rehearsal(report.rehearsal)),
        *([("data", _data(report.data))] if report.data is not None else []),
    ]


def _validation(facts: dict[str, Any]) -> str:
    samples = ", ".join(f"{name} {count:,} samples" for name, count in facts["samples"].items())
    pieces = [f"every {facts['every_steps']:,} steps and at the last one: {samples}"]
    if facts["max_packs"] is not None:
        pieces[0] += f", the first {facts['max_packs']:,} packs"
    by = f"by the loss of {facts['measure'] or 'all sources'}"
    if facts["keep_best"]:
        pieces.append(f"the best checkpoint {by} is kept")
    if facts["patience"] is not None:
        pieces.append(f"the run ends after {facts['patience']:,} validations in succession without a lower loss")
    return "; ".join(pieces)


def _stages(stages: "Sequence[StageCounts]", device: str) -> list[str]:
    """One line for each run of stages that are equal but for their activations: earlier ones hold more packs."""

    def content(stage: "StageCounts") -> str:
        layers = "+".join(str(number) for number in stage.layers)
        more = ["vision and projector"] * stage.has_vision + ["head"] * stage.has_head
        memory = (stage.weight_bytes, stage.gradient_bytes, stage.optimizer_bytes)
        return (
            f"{layers} layers{' with ' * bool(more)}{' and '.join(more)}; on each rank "
            f"{count_text(stage.parameters)} parameters, "
            "weights {}, gradients {}, optimizer {}".format(*(bytes_text(number) for number in memory))
        )

    lines = []
    article = "an" if device == "npu" else "a"
    numbered = [(number, content(stage)) for number, stage in enumerate(stages)]
    for text, same in groupby(numbered, key=lambda one: one[1]):
        numbers = [number for number, _ in same]
        sizes = [stages[number].activation_bytes for number in numbers]
        least, most = (bytes_text(size) for size in (min(sizes), max(sizes)))
        kept = most if least == most else f"{least} to {most}"
        host = max(stages[number].host_activation_bytes for number in numbers)
        offloaded = f", up to {bytes_text(host)} more in host memory" if host else ""
        lines.append(f"{_ranks(numbers)}: {text}, activations {kept} (as on {article} {device}){offloaded}")
    return lines


def _start(start: dict[str, Any]) -> str:
    if start["resumes"]:
        return f"resumes from {start['resumes']}"
    given = [f"{name} from {path}" for name, path in start["init"].items()]
    if start["from_stage"]:
        given = [f"all parts from stage {start['from_stage']}"]
    return ", ".join([*given, *(f"{part} randomly initialized" for part in start["at_random"])])


def _reads(reads: dict[str, Any]) -> str:
    machines = f"{reads['machines']:,} machine{'s' if reads['machines'] > 1 else ''}"
    return (
        f"{machines} read {bytes_text(reads['read_bytes'])} in {reads['seconds']:,.0f} s at {reads['machine_gb_s']:g} GB/s "
        f"each and {reads['total_gb_s']:g} GB/s together; collectives time out after {reads['timeout_s']:,.0f} s"
    )


def _operators(chosen: dict[str, str]) -> str:
    backends = sorted(set(chosen.values()))
    if len(backends) == 1:
        return f"all {len(chosen)} by {backends[0]}"
    return "; ".join(
        f"{backend}: {', '.join(name for name, one in chosen.items() if one == backend)}" for backend in backends
    )


def _rehearsal(rehearsal: dict[str, Any]) -> list[str]:
    """What rehearsals of this recipe found; how long one takes if there is none of the installed versions."""
    lines = [
        f"{found['device']}, {found['sentence'].removesuffix('.')} ({found['path']})"
        for found in rehearsal["found"]
        if found["is_current"]
    ]
    if lines:
        return lines
    at_once = min(rehearsal["num_ranks"], num_cores())
    minutes = max(1, round(rehearsal["work_s"] / at_once / 60))
    ranks = f"{rehearsal['num_ranks']} rank{'s' * (rehearsal['num_ranks'] > 1)}"
    older = "; the one found was made by other versions" if rehearsal["found"] else ""
    return [f"none of this recipe and version{older}; mindvl rehearse takes about {minutes} min here ({ranks})"]


def _data(figures: dict[str, Any]) -> str:
    sources = ", ".join(f"{source['name']} {source['samples_share']:.0%}" for source in figures["sources"])
    return f"first step: {figures['samples_per_pack']:.1f} samples per pack; samples by source: {sources}"


def _ranks(ranks: Sequence[int]) -> str:
    """0, 4, 8, ... 60 in short."""
    if len(ranks) == 1:
        return str(ranks[0])
    step = ranks[1] - ranks[0]
    if list(ranks) != list(range(ranks[0], ranks[-1] + 1, step)):
        return ", ".join(map(str, ranks))
    if len(ranks) == 2:
        return f"{ranks[0]}, {ranks[1]}"
    return f"{ranks[0]} to {ranks[-1]}" + (f" by {step}" if step > 1 else "")
