# SPDX-License-Identifier: Apache-2.0
"""Files of a rehearsal, and the rehearsals of a recipe that a dry run finds in the output directory of the run.

A rehearsal counts for a run if the digest of its resolved recipe, device, number of processes and pack is the same, and
if it was made by the installed versions.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindvl_train.config import RunConfig
from mindvl_train.errors import TrainError
from mindvl_train.layout_search.packs import Pack
from mindvl_train.rehearsal.classes import rank_classes
from mindvl_train.rehearsal.job import job_of, versions
from mindvl_train.resolved_run import ResolvedRun

SUMMARY = "rehearsal.json"
PAGE = "index.html"

# Seconds of one process on one AMD EPYC core: docs/design/evidence/rehearsal.md.
_START_S = 20.0
_LAYER_S = 0.03  # one layer in one microbatch, forward and backward, without recomputation
_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Found:
    """A rehearsal of the same recipe."""

    path: Path  # directory
    device: str
    is_ok: bool
    sentence: str
    is_current: bool  # made by the installed versions


def directory_of(config: RunConfig, device: str, num_processes: int) -> Path:
    """Where a rehearsal is written by default, and where a dry run looks for it."""
    return config.out / "rehearsal" / f"{device}-{num_processes}"


def record_path(directory: Path, rank: int) -> Path:
    """File of the record of one rank."""
    return directory / f"rank-{rank:05d}.json"


def trace_path(directory: Path, rank: int) -> Path:
    """File of the trace of one rank."""
    return directory / f"trace-{rank:05d}.json"


def log_path(directory: Path, rank: int) -> Path:
    """File of the messages of one rank while it runs, and after it failed."""
    return directory / f"rank-{rank:05d}.log"


def find_rehearsals(config: RunConfig, num_processes: int) -> list[Found]:
    """The rehearsals of this recipe on that many processes in its output directory."""
    found = []
    for path in sorted((config.out / "rehearsal").glob(f"*/{SUMMARY}")):
        document = _read(path)
        if document is None or document["devices"] != num_processes:
            continue
        device = document["device"]
        try:
            job = job_of(config, recipe="", device=device, world_size=num_processes, rank=0, steps=document["steps"])
        except TrainError:  # a damaged file, or a device that this version does not rehearse
            continue
        if job.digest == document["recipe_digest"]:
            found.append(
                Found(
                    path=path.parent,
                    device=device,
                    is_ok=document["ok"],
                    sentence=document["sentence"],
                    is_current=document["versions"] == versions(),
                )
            )
    return found


def expected_s(run: ResolvedRun, pp_rank: int) -> float:
    """Seconds that the rehearsal of one rank takes, about."""
    layers = sum(run.chunk_layers[pp_rank :: run.parallel.pp_size])
    if pp_rank == 0:
        layers += run.model.vision.num_layers
    again = 1.5 if run.config.recompute.kind == "full" else 1.0
    return _START_S + _STEPS * run.num_microbatches * layers * again * _LAYER_S


def rehearsal_facts(run: ResolvedRun, pack: Pack) -> dict[str, Any]:
    """For a dry run: the rehearsals that exist, and the number of ranks and seconds of work of a new one."""
    classes = rank_classes(run, pack)
    found = find_rehearsals(run.config, run.num_processes)
    return {
        "found": [asdict(one) | {"path": str(one.path)} for one in found],
        "num_ranks": len(classes),
        "work_s": sum(expected_s(run, each.pp_rank) for each in classes),
    }


def _read(path: Path) -> dict[str, Any] | None:
    """A summary; None if it is not one of this version."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    types = {
        "device": str,
        "devices": int,
        "steps": int,
        "recipe_digest": str,
        "ok": bool,
        "sentence": str,
        "versions": dict,
    }
    is_summary = isinstance(document, dict) and all(
        isinstance(document.get(name), kind) for name, kind in types.items()
    )
    return document if is_summary else None


def remove_others(directory: Path, ranks: Collection[int]) -> None:
    """Remove the files of ranks of an earlier rehearsal in this directory, and its summary."""
    (directory / SUMMARY).unlink(missing_ok=True)
    kept = {path(directory, rank) for rank in ranks for path in (record_path, trace_path)}
    number = 5 * "[0-9]"
    for name in (f"rank-{number}.json", f"trace-{number}.json", f"rank-{number}.log"):
        for path in directory.glob(name):
            if path not in kept:
                path.unlink()
