# SPDX-License-Identifier: Apache-2.0
"""Engines that find and read text in images: rapidocr, Tesseract, and any other by a command or an endpoint.

Used by scene_ocr.py. An engine returns lines with boxes in pixels of the upright image. Nothing is imported or started
before the first image.
"""

import base64
import io
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mindvl_data.curation.endpoint import Endpoint, EndpointConfig, Question, check_endpoint
from mindvl_data.curation.extras import require
from mindvl_data.curation.step import Context
from mindvl_data.errors import DataError, SampleError

MAX_LINES = 5000  # of one image
_MAX_ANSWER_BYTES = 16_000_000
_WORD_LEVEL = "5"  # rows of words in Tesseract's TSV


@dataclass(frozen=True)
class OcrLine:
    """A line of text. The box is x1, y1, x2, y2 in pixels; the score is from 0 to 1."""

    text: str
    xyxy: tuple[float, float, float, float]
    score: float = 1.0


class Engine(Protocol):
    """Reads an image."""

    def read(self, image: NDArray[np.uint8]) -> list[OcrLine]:
        """Lines of an image [H, W, 3], RGB, in any order.

        Raises:
            SampleError: The engine failed for this image.
        """


@dataclass(frozen=True, kw_only=True)
class RapidOcrConfig:
    """PP-OCR by rapidocr-onnxruntime, which contains the weights.

    Attributes:
        kind: "rapidocr".
        min_score: Lines below this score are ignored; 0.5 is the default of rapidocr.
        box_threshold: Threshold of the detector for a box; 0.5 is the default of rapidocr.
        model_directory: Directory with det.onnx, cls.onnx, rec.onnx and optionally keys.txt for other weights of PP-OCR.
    """

    kind: Literal["rapidocr"] = "rapidocr"
    min_score: float = 0.5
    box_threshold: float = 0.5
    model_directory: str | None = None


@dataclass(frozen=True, kw_only=True)
class TesseractConfig:
    """The program tesseract of the system.

    Attributes:
        kind: "tesseract".
        languages: Installed languages, joined by +, for example "eng+chi_sim".
        page_mode: Tesseract's page segmentation mode; 11 finds text in any place of a photo, 3 reads a page.
        min_score: Words below this confidence (0 to 1) are ignored.
        timeout_s: Time for one image in seconds.
    """

    kind: Literal["tesseract"] = "tesseract"
    languages: str = "eng"
    page_mode: int = 11
    min_score: float = 0.5
    timeout_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class CommandOcrConfig:
    """Any program that reads one JSON object from a line of its input and writes one to a line of its output.

    The input is {"image": PNG in base64, "width", "height"}, the output {"lines": [{"text", "box": [x1, y1, x2, y2],
    "score"}]} or {"error": TEXT}. The program is started once per worker and stopped when it is silent for too long.

    Attributes:
        kind: "command".
        command: The program and its arguments.
        timeout_s: Time for one image in seconds.
    """

    kind: Literal["command"] = "command"
    command: tuple[str, ...]
    timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class EndpointOcrConfig:
    """A vision-language model behind an OpenAI-compatible endpoint, which is asked for lines and boxes as JSON.

    Attributes:
        kind: "endpoint".
        endpoint: The endpoint.
        max_tokens: Longest answer in tokens.
        prompt: What the model is asked. The answer must be a JSON list of {"text", "box": [x1, y1, x2, y2]} with coordinates
            from 0 to 1000, so that they do not depend on the size at which the model sees the image.
    """

    kind: Literal["endpoint"] = "endpoint"
    endpoint: EndpointConfig
    max_tokens: int = 4096
    prompt: str = (
        "Read every line of text in this image. Answer with a JSON list only, one object for each line, in reading order: "
        '{"text": "...", "box": [x1, y1, x2, y2]} with coordinates from 0 to 1000 of the width and height of the image.'
    )


EngineConfig = RapidOcrConfig | TesseractConfig | CommandOcrConfig | EndpointOcrConfig


def engine_of(config: EngineConfig, context: Context) -> Engine:
    """The engine of this process for a configuration."""
    key = ("ocr", json.dumps(config.__dict__, sort_keys=True, default=str))

    def build() -> Engine:
        match config:
            case RapidOcrConfig():
                return _RapidOcr(config)
            case TesseractConfig():
                return _Tesseract(config)
            case CommandOcrConfig():
                return _Command(config)
            case EndpointOcrConfig():
                return _Endpoint(config, context)

    return context.resource(key, build)


def check_engine(config: EngineConfig) -> None:
    """Check before any worker starts that an engine is installed.

    Raises:
        DataError: It is not, or a language of Tesseract is missing.
    """
    match config:
        case RapidOcrConfig():
            require("rapidocr_onnxruntime", extra="ocr", where="steps: rapidocr")
        case TesseractConfig():
            missing = set(config.languages.split("+")) - tesseract_languages()
            if missing:
                raise DataError(
                    f"steps: tesseract: the languages {', '.join(sorted(missing))} are not installed. Install them, on Debian "
                    f"the packages tesseract-ocr-LANGUAGE, or change languages. Installed: "
                    f"{', '.join(sorted(tesseract_languages())) or 'none'}."
                )
        case CommandOcrConfig():
            if not config.command or shutil.which(config.command[0]) is None:
                raise DataError(f"steps: command: {config.command!r} is not a program. Install it or correct the path.")
        case EndpointOcrConfig():
            check_endpoint(config.endpoint)


def tesseract_languages() -> set[str]:
    """Installed languages of Tesseract; none if it is not installed."""
    if shutil.which("tesseract") is None:
        return set()
    listed = subprocess.run(["tesseract", "--list-langs"], capture_output=True, text=True, timeout=60, check=False)
    return {line.strip() for line in listed.stdout.splitlines()[1:] if line.strip()}


def lines_from_json(value: Any, width: int, height: int) -> list[OcrLine]:
    """Lines from a JSON list of {"text", "box", "score"}; boxes are limited to the image.

    Raises:
        SampleError: The list has another form, or too many lines.
    """
    if not isinstance(value, list) or len(value) > MAX_LINES:
        raise SampleError(f"the OCR engine did not answer with a list of at most {MAX_LINES} lines")
    lines: list[OcrLine] = []
    for entry in value:
        try:
            x1, y1, x2, y2 = (float(number) for number in entry["box"])
            text, score = str(entry["text"]), float(entry.get("score", 1.0))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SampleError(f"the OCR engine answered with a line without text or box: {entry!r:.100}") from error
        box = (max(x1, 0.0), max(y1, 0.0), min(x2, float(width)), min(y2, float(height)))
        if text.strip() and box[0] < box[2] and box[1] < box[3]:
            lines.append(OcrLine(text.strip(), box, score))
    return lines


class _RapidOcr:
    def __init__(self, config: RapidOcrConfig) -> None:
        module = require("rapidocr_onnxruntime", extra="ocr", where="steps: rapidocr")
        options: dict[str, Any] = {"intra_op_num_threads": 1, "inter_op_num_threads": 1}
        if config.model_directory is not None:
            for part in ("det", "cls", "rec"):
                options[f"{part}_model_path"] = os.path.join(config.model_directory, f"{part}.onnx")
            keys = os.path.join(config.model_directory, "keys.txt")
            options |= {"rec_keys_path": keys} if os.path.exists(keys) else {}
        self._config, self._engine = config, module.RapidOCR(**options)

    def read(self, image: NDArray[np.uint8]) -> list[OcrLine]:
        found, _ = self._engine(
            np.ascontiguousarray(image[..., ::-1]),
            box_thresh=self._config.box_threshold,
            text_score=self._config.min_score,
        )
        entries = [
            {
                "text": text,
                "box": [*np.min(corners, axis=0), *np.max(corners, axis=0)],
                "score": score,
            }
            for corners, text, score in found or ()
        ]
        return lines_from_json(entries, image.shape[1], image.shape[0])


class _Tesseract:
    def __init__(self, config: TesseractConfig) -> None:
        check_engine(config)
        self._config = config

    def read(self, image: NDArray[np.uint8]) -> list[OcrLine]:
        config = self._config
        command = ["tesseract", "stdin", "stdout", "-l", config.languages, "--psm", str(config.page_mode), "tsv"]
        try:
            answer = subprocess.run(
                command,
                input=_encoded(image),
                capture_output=True,
                timeout=config.timeout_s,
                check=False,
                env={**os.environ, "OMP_THREAD_LIMIT": "1"},
            )
        except subprocess.TimeoutExpired as error:
            raise SampleError(f"tesseract takes more than {config.timeout_s:g} seconds (timeout_s)") from error
        if answer.returncode:
            raise SampleError(
                f"tesseract failed with code {answer.returncode}: {answer.stderr.decode(errors='replace')[:200]}"
            )
        return lines_from_tsv(answer.stdout.decode(errors="replace"), config.min_score)


def lines_from_tsv(table: str, min_score: float) -> list[OcrLine]:
    """Join the words of Tesseract's TSV to lines; words below a confidence (0 to 1) are left out."""
    words: dict[tuple[str, ...], list[OcrLine]] = {}
    for row in table.splitlines()[1:]:
        fields = row.split("\t")
        if len(fields) < 12 or fields[0] != _WORD_LEVEL or not fields[11].strip():
            continue
        left, top, width, height = map(int, fields[6:10])
        score = float(fields[10]) / 100
        if score >= min_score:
            word = OcrLine(fields[11].strip(), (left, top, left + width, top + height), score)
            words.setdefault(tuple(fields[1:5]), []).append(word)
    return [_line(found) for found in list(words.values())[:MAX_LINES]]


def _line(words: Sequence[OcrLine]) -> OcrLine:
    boxes = np.array([word.xyxy for word in words])
    x1, y1 = boxes[:, :2].min(axis=0)
    x2, y2 = boxes[:, 2:].max(axis=0)
    score = sum(word.score for word in words) / len(words)
    return OcrLine(" ".join(word.text for word in words), (float(x1), float(y1), float(x2), float(y2)), round(score, 4))


class _Command:
    """One running program; it is started again after an image that made it fail."""

    def __init__(self, config: CommandOcrConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, image: NDArray[np.uint8]) -> list[OcrLine]:
        height, width = image.shape[:2]
        encoded = base64.b64encode(_encoded(image)).decode()
        request = json.dumps({"image": encoded, "width": width, "height": height}) + "\n"
        try:
            answer = json.loads(self._asked(request.encode()))
        except (OSError, ValueError, SampleError) as error:
            self._stop()
            raise SampleError(f"the OCR command {self._config.command[0]} failed: {error}") from error
        if not isinstance(answer, dict) or "error" in answer:
            raise SampleError(
                f"the OCR command reports: {answer.get('error') if isinstance(answer, dict) else answer!r:.200}"
            )
        return lines_from_json(answer.get("lines"), width, height)

    def _asked(self, request: bytes) -> bytes:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(self._config.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._config.timeout_s
        _write(self._process.stdin, request, deadline)
        answer = b""
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not piece:
                ended = "it ended" if ready else f"no answer after {self._config.timeout_s:g} seconds (timeout_s)"
                raise SampleError(ended)
            answer += piece
            if len(answer) > _MAX_ANSWER_BYTES:
                raise SampleError(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
        return answer

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _write(pipe: IO[bytes], request: bytes, deadline: float) -> None:
    """Write without waiting forever for a program that does not read."""
    os.set_blocking(pipe.fileno(), False)
    sent = 0
    while sent < len(request):
        _, ready, _ = select.select([], [pipe], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise SampleError("it does not read its input (timeout_s)")
        sent += os.write(pipe.fileno(), request[sent : sent + (1 << 16)])


class _Endpoint:
    def __init__(self, config: EndpointOcrConfig, context: Context) -> None:
        self._config, self._endpoint = config, Endpoint.of(config.endpoint, context)

    def read(self, image: NDArray[np.uint8]) -> list[OcrLine]:
        question = Question([_encoded(image), self._config.prompt], max_tokens=self._config.max_tokens)
        reply = self._endpoint.ask(question).text
        start, stop = reply.find("["), reply.rfind("]")
        try:
            value = json.loads(reply[start : stop + 1])
        except ValueError as error:
            raise SampleError(f"the endpoint did not answer with a JSON list: {reply!r:.100}") from error
        height, width = image.shape[:2]
        return [
            OcrLine(line.text, _scaled(line.xyxy, width / 1000, height / 1000), line.score)
            for line in lines_from_json(value, 1000, 1000)
        ]


def _scaled(box: tuple[float, float, float, float], across: float, down: float) -> tuple[float, float, float, float]:
    return box[0] * across, box[1] * down, box[2] * across, box[3] * down


def _encoded(image: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
