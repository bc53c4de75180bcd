# SPDX-License-Identifier: Apache-2.0
"""Cache of answers as JSONL, so that an interrupted evaluation resumes and a search answers no question twice."""

import json
from collections.abc import Mapping
from pathlib import Path


class AnswerCache:
    """Answers by key with the seconds that they took, in memory, and in a file when a path is given.

    A last line truncated by a killed process is dropped; the file is append-only.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.answers: dict[str, str] = {}
        self.seconds: dict[str, float] = {}  # of the answers whose time was measured
        if path is not None and path.is_file():
            self._read(path)

    def add(self, answers: Mapping[str, str], seconds: Mapping[str, float] | None = None) -> None:
        """Keep a batch of answers; they are on disk when this returns."""
        self.answers.update(answers)
        self.seconds.update(seconds or {})
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(self._row(key)) + "\n" for key in answers)

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
            row = json.loads(line)
            self.answers[row["key"]] = row["answer"]
            if "seconds" in row:
                self.seconds[row["key"]] = row["seconds"]
