# SPDX-License-Identifier: Apache-2.0
"""The ledger: what was consumed, by which recipe, on which data; saved with checkpoints and as an append-only log.

Stands beside planner and loader. The state says where the plan stands after the last complete step, and the
identities of everything the plan depends on; restoring refuses a mismatch by name. It does not depend on the number
of ranks.
"""

import dataclasses
import hashlib
import json
import mmap
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindvl_data.config import DataConfig
from mindvl_data.errors import DataError
from mindvl_data.plan.planner import PlannedStep
from mindvl_data.plan.sources import SourceIndex
from mindvl_data.tokenization import Tokenizer

STATE_VERSION = 1
PLAN_VERSION = 3  # raised when the same configuration would give another plan
_AUDIT_LINE_START = b'{"step":'
_AUDIT_LINE = re.compile(rb'\{"step":(\d+),')
_AUDIT_LINE_HEAD = 40  # bytes; more than the step's number can take


def identities(
    config: DataConfig, sources: Sequence[SourceIndex], tokenizer: Tokenizer, rows_per_step: int
) -> dict[str, str]:
    """Name -> hash of everything that decides the plan. Folders may move; speed settings may change."""
    recipe = {
        "plan_version": PLAN_VERSION,
        "rows_per_step": rows_per_step,
        "seed": config.seed,
        "weight_unit": config.weight_unit,
        "text_share": config.text_share,
        "shuffle_window": config.shuffle_window,
        "packing": dataclasses.asdict(config.packing),
        "sources": [[s.name, s.weight, s.max_epochs, s.first, s.fraction] for s in config.sources],
    }
    media = [[s.name, dataclasses.asdict(s.rules)] for s in sources]
    return {
        "recipe": _digest(recipe),
        "tokenizer and chat template": tokenizer.identity[:16],
        "image and video processor": _digest(media),
        **{f"index of {s.name}": s.index.identity[:16] for s in sources},
    }


def seal_state(plan_state: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The plan's state with version, identities and checksum."""
    body = {"version": STATE_VERSION, "identities": names, "plan": plan_state}
    return {**body, "checksum": _digest(body)}


def open_state(state: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Check a sealed state against this run; returns the plan's state.

    Raises:
        DataError: Other version, damaged, or made with another recipe, index, tokenizer or processor.
    """
    if state.get("version") != STATE_VERSION:
        raise DataError(
            f"ledger state has version {state.get('version')} instead of {STATE_VERSION}. Checkpoint. "
            "Use the mindvl-data that wrote it, or start the data anew."
        )
    body = {key: value for key, value in state.items() if key != "checksum"}
    if _digest(body) != state.get("checksum"):
        raise DataError("ledger state is damaged: its checksum is wrong. Checkpoint. Resume from an older one.")
    saved: dict[str, str] = state["identities"]
    changed = sorted(name for name in saved.keys() | names.keys() if saved.get(name) != names.get(name))
    if changed:
        raise DataError(
            f"{', '.join(changed)} changed since the checkpoint was written. data. "
            "Restore what changed, or start the data anew."
        )
    plan: dict[str, Any] = state["plan"]
    return plan


class AuditLog:
    """Appends one JSON line per step: which samples it consumed. Each step stands there once, in order.

    What a stopped run logged beyond the step that its successor starts from is dropped, and so is a last line cut off
    by a kill.
    """

    def __init__(self, path: Path, sources: Sequence[SourceIndex]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = open(path, "a+b")  # noqa: SIM115 - closed by close()
        self._sources = sources
        self._is_fresh = True  # no step was recorded since the log was opened
        self._cut(None)

    def record(self, step: PlannedStep) -> None:
        """Write the step's samples by row, as [source, epoch, shard, row in shard]."""
        if self._is_fresh:
            self.rewind(step.step - 1)
        rows = [
            [
                [self._sources[s.source].name, s.epoch, self._sources[s.source].index.shards[s.shard].path.name, s.row]
                for s in row
            ]
            for row in step.rows
        ]
        self._file.write(json.dumps({"step": step.step, "rows": rows}, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Drop the lines after `step`.

        Raises:
            DataError: The file holds something other than steps.
        """
        self._cut(step)
        self._is_fresh = False

    def close(self) -> None:
        self._file.close()

    def _cut(self, last_step: int | None) -> None:
        """Shorten the file to its whole lines up to `last_step`, read from the end, because it can be long."""
        size = self._path.stat().st_size
        if not size:
            return  # an empty file cannot be mapped
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if not _AUDIT_LINE_START.startswith(content[: len(_AUDIT_LINE_START)]):
                raise self._foreign(0)
            keep = content.rfind(b"\n") + 1
            while last_step is not None and keep:
                start = content.rfind(b"\n", 0, keep - 1) + 1
                found = _AUDIT_LINE.match(content[start : start + _AUDIT_LINE_HEAD])
                if found is None:
                    raise self._foreign(start)
                if int(found[1]) <= last_step:
                    break
                keep = start
        if keep < size:
            self._file.truncate(keep)

    def _foreign(self, offset: int) -> DataError:
        return DataError(
            f"line is no step of an audit log. {self._path} at byte {offset}. Name another file as data.audit_log."
        )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
