# SPDX-License-Identifier: Apache-2.0
"""Sinks of metrics: a JSONL file, TensorBoard, the log, Weights & Biases, SwanLab."""

import errno
import functools
import hashlib
import importlib
import json
import logging
import math
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from mindvl_train.config import RunConfig
from mindvl_train.errors import TrainError

logger = logging.getLogger(__name__)


def open_sinks(config: RunConfig, resumed_step: int, validated_step: int = 0) -> list[Any]:
    """Open the sinks of the recipe; lines after the resumed step are removed.

    Args:
        validated_step: Last validated step of the resumed checkpoint.

    Raises:
        TrainError: metrics.wandb_project or metrics.swanlab_project is set, but its package is not installed.
    """
    sinks: list[Any] = [JsonLines(config.out / "metrics.jsonl", resumed_step), Log()]
    if config.validation is not None:
        sinks.append(ValidationLines(config.out / "validation.jsonl", validated_step))
    if config.metrics.tensorboard:
        sinks.append(TensorBoard(config.out / "tensorboard", resumed_step))
    if config.metrics.wandb_project is not None:
        sinks.append(WeightsAndBiases(config.metrics.wandb_project, config.out))
    if config.metrics.swanlab_project is not None:
        sinks.append(SwanLab(config.metrics.swanlab_project, config.out))
    return sinks


class JsonLines:
    """One line per report in OUT/metrics.jsonl; on resume, lines after the resumed step are removed."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        kept = [line for line in read_metrics(path) if line["step"] <= resumed_step] if path.is_file() else []
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(temporary, path)
        self._file = path.open("a")

    def write(self, report: dict[str, Any]) -> None:
        """Append one report; values that are not finite, such as the norm of a skipped step, are null."""
        self._file.write(json.dumps({name: _finite(value) for name, value in report.items()}) + "\n")
        self._file.flush()

    def write_validation(self, report: dict[str, Any]) -> None:
        """Validations have a file of their own."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ValidationLines(JsonLines):
    """One line per validation in OUT/validation.jsonl; on resume, lines after the last validated step are removed."""

    def write(self, report: dict[str, Any]) -> None:
        """Reports have a file of their own."""

    def write_validation(self, report: dict[str, Any]) -> None:
        """Append one validation."""
        super().write(report)


class TensorBoard:
    """Scalars under OUT/tensorboard, one event per report.

    TensorBoard's own writer uses a thread that ends with a traceback on a full disk and loses its queue. Reports are
    small and rare, so this class writes them synchronously and atomically: an incomplete event would hide all later
    events from TensorBoard.
    """

    def __init__(self, directory: Path, resumed_step: int) -> None:
        from tensorboard.compat.proto import event_pb2

        self._event: Any = event_pb2.Event
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("ab", buffering=0)
        self._append(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        # TensorBoard hides earlier events of this step and later ones.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._append(self._event(wall_time=time.time(), step=resumed_step + 1, session_log=start))

    def write(self, report: dict[str, Any]) -> None:
        """Add every number of the report at its step; groups as `loss_by_source/pages`.

        Raises:
            OSError: The event could not be written; the file is unchanged.
        """
        event = self._event(wall_time=time.time(), step=report["step"])
        for name, value in flat(report).items():
            event.summary.value.add(tag=name, simple_value=float(value))
        self._append(event)

    def write_validation(self, report: dict[str, Any]) -> None:
        """Add the numbers of a validation as `validation/NAME`, and generations as text."""
        event = self._event(wall_time=time.time(), step=report["step"])
        for name, value in _validation_numbers(report).items():
            event.summary.value.add(tag=name, simple_value=float(value))
        for one in report.get("generations", ()):
            text = event.summary.value.add(tag=f"generations/{one['name']}/text_summary")
            text.metadata.plugin_data.plugin_name = "text"
            text.tensor.dtype = 7  # DT_STRING
            text.tensor.tensor_shape.dim.add(size=1)
            text.tensor.string_val.append(_as_markdown(one).encode())
        self._append(event)

    def close(self) -> None:
        """Close the event file."""
        self._file.close()

    def _append(self, event: Any) -> None:
        record = tensorboard_record(event.SerializeToString())
        before = self._file.seek(0, os.SEEK_END)
        written = 0
        try:
            written = self._file.write(record) or 0
            if written < len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        except OSError:
            if written:
                self._file.truncate(before)
            raise


class WeightsAndBiases:
    """Logs reports to Weights & Biases, with one run id per output directory, so that a resumed run extends its curves.

    Weights & Biases keeps values reported after the resumed step and ignores second values for these steps.

    Raises:
        TrainError: wandb is not installed.
    """

    def __init__(self, project: str, out: Path) -> None:
        wandb = _tracker("wandb", project)
        self._wandb = wandb
        self._run = wandb.init(project=project, name=out.name, id=_run_id(out), dir=str(out.resolve()), resume="allow")

    def write(self, report: dict[str, Any]) -> None:
        """Send every number of the report at its step."""
        self._run.log(flat(report), step=report["step"])

    def write_validation(self, report: dict[str, Any]) -> None:
        """Send the numbers of a validation as `validation/NAME`, at the step that was validated."""
        values: dict[str, Any] = dict(_validation_numbers(report))
        if report.get("generations"):
            columns = ["name", "prompt", "answer", "expected"]
            rows = [[one[column] for column in columns] for one in report["generations"]]
            values["generations"] = self._wandb.Table(columns=columns, data=rows)
        self._run.log(values, step=report["step"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class SwanLab:
    """Logs reports to SwanLab, with one run id per output directory, as for Weights & Biases; SWANLAB_MODE applies.

    Raises:
        TrainError: swanlab is not installed.
    """

    def __init__(self, project: str, out: Path) -> None:
        self._swanlab = _tracker("swanlab", project)
        self._run = self._swanlab.init(
            project=project, name=out.name, id=_run_id(out), log_dir=str(out / "swanlab"), resume="allow"
        )

    def write(self, report: dict[str, Any]) -> None:
        """Send every number of the report at its step."""
        self._run.log(flat(report), step=report["step"])

    def write_validation(self, report: dict[str, Any]) -> None:
        """Send the numbers of a validation as `validation/NAME`, and its answers as texts."""
        values: dict[str, Any] = dict(_validation_numbers(report))
        for one in report.get("generations") or ():
            text = f"prompt: {one['prompt']}\nanswer: {one['answer']}"
            values[f"generations/{one['name']}"] = self._swanlab.Text(text)
        self._run.log(values, step=report["step"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Log:
    """One log line per report."""

    def write(self, report: dict[str, Any]) -> None:
        """Log the main metrics."""
        pieces = [
            "step {step}: loss {loss:.4f}, lr {learning_rate:.2e}, grad norm {grad_norm:.2f}, "
            "{tokens_per_s:.0f} tokens/s".format(**report)
        ]
        if "mfu" in report:
            pieces.append(f"MFU {100 * report['mfu']:.1f} %")
        if "mtp_loss" in report:
            pieces.append("MTP loss " + ", ".join(f"{loss:.3f}" for loss in report["mtp_loss"].values()))
        if "routers" in report:
            layer, load = max(report["routers"]["load"].items(), key=lambda item: item[1])
            pieces.append(f"busiest expert {load:.2f} times the mean, in layer {layer}")
        if lost := _worst(report.get("step_split", {})):
            pieces.append(lost)
        logger.info("%s", ", ".join(pieces))

    def write_validation(self, report: dict[str, Any]) -> None:
        """Log the losses."""
        sources = ", ".join(f"{name} {loss:.4f}" for name, loss in report["loss_by_source"].items())
        logger.info(
            "validation at step %d: loss %.4f%s, token accuracy %.1f %%%s",
            report["step"],
            report["loss"],
            f" ({sources})" if len(report["loss_by_source"]) > 1 else "",
            100 * report["token_accuracy"],
            ", the best so far" if report["is_best"] else "",
        )

    def close(self) -> None:
        """Nothing to close."""


def _tracker(package: str, project: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise TrainError(
            f"metrics.{package}_project: is {project}, but {package} is not installed. Run pip install {package}, or "
            f"remove metrics.{package}_project: OUT/metrics.jsonl and OUT/tensorboard have the same metrics."
        ) from None


def _run_id(out: Path) -> str:
    return hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16]


def tensorboard_record(content: bytes) -> bytes:
    """One record of an event file: length, checksum of the length, content, checksum of the content.

    TensorBoard's own writer imports its substitute for TensorFlow, which takes half a second where boto3 is installed.
    """
    length = struct.pack("<Q", len(content))
    return length + _masked_crc32c(length) + content + _masked_crc32c(content)


def flat(report: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a report by name, in groups as group/name; without the step."""
    numbers: dict[str, float] = {}
    for name, value in report.items():
        if isinstance(value, dict):
            numbers |= flat(value, f"{prefix}{name}/")
        elif prefix or name != "step":
            numbers[f"{prefix}{name}"] = value
    return numbers


def _validation_numbers(report: dict[str, Any]) -> dict[str, float]:
    """The numbers of a validation by name, in the group `validation`."""
    return flat({name: value for name, value in report.items() if name not in ("step", "generations")}, "validation/")


def _as_markdown(generation: dict[str, Any]) -> str:
    """A prompt and its answer; indented lines are shown as they are."""
    parts = {"prompt": generation["prompt"], "answer": generation["answer"], "expected": generation["expected"]}
    blocks = [(name, text.replace("\n", "\n    ")) for name, text in parts.items() if text is not None]
    return "\n\n".join(f"{name}:\n\n    {text}" for name, text in blocks)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a metrics file, without an incomplete last line."""
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


@functools.cache
def _crc32c_table() -> list[int]:
    """The remainder of every byte for the Castagnoli polynomial, bits reversed."""
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ (0x82F63B78 if value & 1 else 0) for value in table]
    return table


def _masked_crc32c(content: bytes) -> bytes:
    """CRC-32C, rotated by 15 bits, plus a constant, as TFRecord files store it."""
    table, crc = _crc32c_table(), 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _finite(value: Any) -> Any:
    """Replace nan and infinity, which JSON cannot represent, by None; remove them from groups."""
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if not isinstance(one, float) or math.isfinite(one)}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _worst(split: dict[str, float]) -> str:
    """The largest part of the step besides computation, if it is more than 5 %."""
    lost = {name: seconds for name, seconds in split.items() if name not in ("vision", "language")}
    if not lost:
        return ""
    name = max(lost, key=lambda one: lost[one])
    share = lost[name] / sum(split.values())
    return f"{name.replace('_', ' ')} {100 * share:.0f} % of the step" if share > 0.05 else ""
