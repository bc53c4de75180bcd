# SPDX-License-Identifier: Apache-2.0
"""Check a pipeline before any work: order of the steps, installed libraries, files of the steps, output directory, disk.

Called by pipeline.py before the first worker starts. Every problem is found at once.
"""

import json
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from mindvl_data.curation.config import CurationConfig
from mindvl_data.curation.engine.parts import InputFiles
from mindvl_data.curation.extras import missing_modules
from mindvl_data.curation.output import MANIFEST_NAME, SHARDS_NAME
from mindvl_data.curation.step import Context, all_steps
from mindvl_data.errors import DataError

logger = logging.getLogger(__name__)

CONTENT = frozenset({"image", "text", "document"})

# Files in the directory `work` of a run: those of segments and decisions, the log, the lock, deleted files of NFS.
_OWN_WORK = re.compile(r"(segment|decisions)-\d+-[0-9a-f]{16}(\.partial|\.scratch)?|workers\.log|\.claimed|\.nfs.*")
_LEAST_FREE_BYTES = 1 << 28


def check_steps(config: CurationConfig) -> None:
    """Check that every step finds what it needs.

    Raises:
        DataError: A fact is not given by an earlier step.
    """
    given: set[str] = set()
    for one in config.inputs:
        given |= {"document"} if one.format == "pdf" else {"image", "text"}
    for index, step in enumerate(config.steps):
        definition, where = step.definition, f"steps.{index}: {step.step}"
        for need in definition.needs:
            if need not in given:
                raise DataError(f"{where}: needs {need!r}, which {_remedy(need)}")
        given |= set(definition.gives)
        if "document" in definition.needs:
            given |= {"image", "text"}


def check_libraries(config: CurationConfig) -> None:
    """Check that the libraries of the steps are installed.

    Raises:
        DataError: A library is missing.
    """
    for index, step in enumerate(config.steps):
        definition = step.definition
        for extra in ("curation", *([definition.extra] if definition.extra else [])):
            missing = missing_modules(extra)
            if missing:
                where = f"steps.{index}: {step.step}"
                raise DataError(f"{where}: needs {missing[0]}, which is not installed. Install mindvl-data[{extra}].")


def prepare_steps(config: CurationConfig, context: Context) -> None:
    """Let every step check its files and endpoints.

    Raises:
        DataError: A file is missing or an endpoint does not answer.
    """
    for step in config.steps:
        if step.definition.prepare is not None:
            step.definition.prepare(step.parameters, context)


def finished_run(out: Path, digest: str) -> bool:
    """Whether the directory holds the result of this very run.

    Raises:
        DataError: It holds the result of another configuration, or files of something else.
    """
    if (out / MANIFEST_NAME).is_file():
        try:
            found = json.loads((out / MANIFEST_NAME).read_bytes()).get("digest")
        except (ValueError, AttributeError):
            found = None
        if found != digest:
            raise DataError(
                f"{out}: the directory holds the result of another configuration, other inputs or another version. "
                "Choose another directory with --out, or remove this one."
            )
        return True
    if (out / SHARDS_NAME).is_dir() and not (out / "work").is_dir():
        raise DataError(f"{out / SHARDS_NAME}: the directory exists already. Choose another directory with --out.")
    return False


def check_work(work: Path) -> None:
    """Check that the directory for temporary files, whose content is removed, has no files of something else.

    Raises:
        DataError: It has.
    """
    for path in sorted(work.iterdir()) if work.is_dir() else ():
        if not _OWN_WORK.fullmatch(path.name):
            raise DataError(
                f"{path}: is not a file of a curation run, which keeps temporary files in {work}. Choose another "
                "directory with --out, or move the file."
            )


def check_disk(out: Path, identities: Sequence[InputFiles], share: float) -> None:
    """Check free space; files between segments and shards may take as much as the inputs.

    Args:
        share: Share of the inputs that is read, less than 1 with `--sample`.

    Raises:
        DataError: There is almost no space.
    """
    free = shutil.disk_usage(out).free
    expected = int(share * sum(identity.num_bytes for identity in identities))
    if free < _LEAST_FREE_BYTES:
        raise DataError(f"{out}: only {free / 1e6:,.0f} MB are free on this disk. Free space, or choose another --out.")
    if free < 2 * expected:
        logger.warning(
            "%s: %.1f GB are free; records between steps and shards need up to %.1f GB if no record is dropped.",
            out, free / 1e9, 2 * expected / 1e9,
        )  # fmt: skip


def _remedy(need: str) -> str:
    if need in CONTENT:
        return "no input has. Remove the step, or add an input of another format."
    names = [name for name, step in all_steps().items() if need in step.gives]
    first = f"Add one of these steps before it: {', '.join(names)}." if names else "No registered step gives it."
    return f"no earlier step gives. {first}"
