# SPDX-License-Identifier: Apache-2.0
"""Stages that run once: each writes a record when it is finished, so that an interrupted demo can be resumed.

Comes before pipeline.py, which lists the stages. Records are written atomically; an unfinished stage removes or resumes
its own files.
"""

import contextlib
import hashlib
import io
import json
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mindvl_cli.failures import CliError
from mindvl_cli.interrupts import Stopped
from mindvl_cli.whole_file import write_whole


class StageBook:
    """Records of finished stages under OUT/stages.

    Args:
        out: Directory of the demo.
        fingerprint: Hash of settings, seed and versions; records with another fingerprint are refused.

    Raises:
        CliError: The directory holds stages of other settings.
    """

    def __init__(self, out: Path, fingerprint: str) -> None:
        self.out, self._directory = out, out / "stages"
        self._directory.mkdir(parents=True, exist_ok=True)
        known = self._directory / "fingerprint"
        if not known.is_file():
            write_whole(known, fingerprint)
        elif known.read_text() != fingerprint:
            raise CliError(
                f"{out}: has a demo with another seed, size or code version. Start over with --fresh, or choose another "
                "directory with --out."
            )
        self.seconds: dict[str, float] = {}
        self.commands: dict[str, list[str]] = {}

    def run(self, name: str, action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run a stage unless its record exists; returns its record (JSON values)."""
        record = self._directory / f"{name}.json"
        if not record.is_file():
            click.echo(f"== {name}", err=True)
            self.commands[name] = []
            started = time.perf_counter()
            self._current = name
            result = action()
            content = {"result": result, "seconds": time.perf_counter() - started, "commands": self.commands[name]}
            write_whole(record, json.dumps(content, indent=1))
        stored = json.loads(record.read_text())
        self.seconds[name], self.commands[name] = stored["seconds"], stored["commands"]
        return stored["result"]

    def command(self, *arguments: str | Path) -> dict[str, Any]:
        """Run a mindvl command in this process and return its --json document."""
        from mindvl_cli.main import cli

        words = [str(argument) for argument in arguments]
        self.commands[self._current].append("mindvl " + " ".join(map(shlex.quote, words)))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            cli.main(args=[*words, "--json"], prog_name="mindvl", standalone_mode=False)
        document: dict[str, Any] = json.loads(printed.getvalue())
        if document.get("asked_to_stop"):  # in the last step of a training run, which then finished
            raise Stopped(signal.SIGTERM)
        return document


def start_over(out: Path) -> None:
    """Remove the directory of an earlier demo; other directories are refused.

    Raises:
        CliError: The directory is not that of a demo.
    """
    if not out.exists():
        return
    if any(out.iterdir()) and not (out / "stages").is_dir():
        raise CliError(
            f"{out}: has files of something else than a demo, so --fresh does not remove it. Choose another --out."
        )
    shutil.rmtree(out)


def fingerprint_of(settings: Any) -> str:
    """A short hash of the settings that the records of a demo depend on."""
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
