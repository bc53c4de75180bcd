# SPDX-License-Identifier: Apache-2.0
"""Cut a pipeline into segments at its set steps, and name the directory of each by everything that decides its content.

A changed configuration gives other names from the first changed step on, so that finished parts before it are used again
and parts after it are computed again.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindvl_data.curation.config import CurationConfig
from mindvl_data.curation.engine.parts import InputFiles, Part
from mindvl_data.curation.engine.tasks import Segment

FORMAT_VERSION = 1  # of the files between segments


def cut_segments(
    config: CurationConfig, work: Path, parts: Sequence[Part], identities: Sequence[InputFiles], version: str
) -> tuple[list[Segment], str]:
    """The segments in order, and the digest of the whole run.

    Args:
        work: Directory for the files of the segments.
        parts: Parts of the inputs.
        identities: Files of the inputs.
        version: Of mindvl-data.
    """
    chosen = [(part.number, part.take) for part in parts]
    state = [FORMAT_VERSION, version, config.name, config.seed, config.limits.media_mib, config.output.list_dropped]
    digest = _digest("", [*state, [plain(one) for one in config.inputs], [plain(one) for one in identities], chosen])
    gives = {index: step.definition.gives for index, step in enumerate(config.steps)}
    segments: list[Segment] = []
    steps: list[tuple[int, str, Any]] = []
    source: Path | None = None
    decisions: Path | None = None
    applied: tuple[int, str] | None = None
    for index, step in enumerate(config.steps):
        digest = _digest(digest, [step.step, plain(step.parameters), _files(step.parameters)])
        is_set_step = step.definition.sign is not None
        if not is_set_step:
            steps.append((index, step.step, step.parameters))
            continue
        segment = Segment(
            index=len(segments), directory=work / f"segment-{len(segments)}-{digest[:16]}", source=source,
            decisions=decisions, applied=applied, steps=tuple(steps), signed=(index, step.step, step.parameters),
            gives=gives,
        )  # fmt: skip
        segments.append(segment)
        source, applied, steps = segment.directory, (index, step.step), []
        decisions = work / f"decisions-{index}-{digest[:16]}"
    digest = _digest(digest, ["end", len(config.steps)])
    last = Segment(
        index=len(segments), directory=work / f"segment-{len(segments)}-{digest[:16]}", source=source,
        decisions=decisions, applied=applied, steps=tuple(steps), signed=None, gives=gives,
    )  # fmt: skip
    return [*segments, last], _digest(digest, plain(config.output))


def plain(value: Any) -> Any:
    """A configuration as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        entries = [plain(entry) for entry in value]
        return sorted(entries, key=repr) if isinstance(value, set | frozenset) else entries
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _files(value: Any) -> Any:
    """Size and time of each file that the parameters name, and of the files of each model directory."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_files(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        return [_files(entry) for entry in value]
    if isinstance(value, Path) and value.is_file():
        status = value.stat()
        return [status.st_size, status.st_mtime_ns]
    if isinstance(value, Path) and (value / "config.json").is_file():  # other directories are written by steps
        return [[file.name, *_files(file)] for file in sorted(value.iterdir()) if file.is_file()]
    return None


def _digest(before: str, state: Any) -> str:
    return hashlib.sha256((before + json.dumps(state, sort_keys=True, default=str)).encode()).hexdigest()
