# SPDX-License-Identifier: Apache-2.0
"""Where reports go: a JSONL file, TensorBoard, the log."""

import json
import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class JsonLines:
    """One line per report in OUT/metrics.jsonl; on resume, lines after the resumed step are dropped."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        kept = [line for line in read_metrics(path) if line["step"] <= resumed_step] if path.is_file() else []
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(temporary, path)
        self._file = path.open("a")

    def write(self, report: dict[str, Any]) -> None:
        """Append one report."""
        self._file.write(json.dumps(report) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars under OUT/tensorboard."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def write(self, report: dict[str, Any]) -> None:
        """Add every number of the report at its step."""
        for name, value in report.items():
            if name != "step":
                self._writer.add_scalar(name, value, report["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class Log:
    """One log line per report."""

    def write(self, report: dict[str, Any]) -> None:
        """Log the numbers a person follows."""
        logger.info(
            "step %d: loss %.4f, lr %.2e, grad norm %.2f, %.0f tokens/s",
            *(report[name] for name in ("step", "loss", "learning_rate", "grad_norm", "tokens_per_s")),
        )

    def close(self) -> None:
        """Nothing to close."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a metrics file; a last line cut off by a kill is left out."""
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
