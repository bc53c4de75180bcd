# SPDX-License-Identifier: Apache-2.0
"""Cache of answers as JSONL, so that an interrupted evaluation resumes and a search answers no question twice."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mindvl_merge.errors import EvaluationError


class AnswerCache:
    """Answers by key with the seconds that they took, in memory, and in a file when a path is given.

    A last line truncated by a killed process is dropped, and damaged lines are ignored; the file is append-only.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.answers: dict[str, str] = {}
        self.seconds: dict[str, float] = {}  # of the answers whose time was measured
        if path is not None and path.is_file():
            self._read(path)

    def add(self, answers: Mapping[str, str], seconds: Mapping[str, float] | None = None) -> None:
        """Keep a batch of answers; they are on disk when this returns.

        Raises:
            EvaluationError: The file cannot be written.
        """
        self.answers.update(answers)
        self.seconds.update(seconds or {})
        if self.path is None:
            return
        rows = "".join(json.dumps(self._row(key)) + "\n" for key in answers).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab", buffering=0) as file:
                start = file.tell()
                try:
                    written = 0
                    while written < len(rows):
                        written += file.write(rows[written:])
                except OSError:  # for example a full disk: no part of a line stays
                    with suppress(OSError):
                        file.truncate(start)
                    raise
        except OSError as error:
            raise EvaluationError(
                f"{self.path}: answers cannot be saved ({error.strerror}). Free space or change permissions, and run the command "
                "again: it continues from the answers that were saved."
            ) from error

    def _row(self, key: str) -> dict[str, object]:
        row: dict[str, object] = {"key": key, "answer": self.answers[key]}
        return row | ({"seconds": round(self.seconds[key], 6)} if key in self.seconds else {})

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with open(path, "r+b") as file:
                file.truncate(len(whole))
        for line in whole.splitlines():
            try:
                row = json.loads(line)
                key, answer, seconds = row["key"], row["answer"], row.get("seconds")
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # damaged; its question is asked again
            if isinstance(key, str) and isinstance(answer, str):
                self.answers[key] = answer
                if isinstance(seconds, int | float):
                    self.seconds[key] = float(seconds)
