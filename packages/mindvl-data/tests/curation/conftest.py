# SPDX-License-Identifier: Apache-2.0
"""What the tests of curation share: signatures in memory, so that set steps are tested without an engine, and a small
server of chat completions whose answers and faults a test chooses."""

import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Decision, Step


@dataclass
class MemorySignatures:
    """The protocol `Signatures` over arrays, in blocks of a few rows."""

    numbers: NDArray[np.uint64]
    pieces: NDArray[np.uint32]
    values: NDArray[np.uint8]
    block_rows: int = 7

    @property
    def width(self) -> int:
        return self.values.shape[1]

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def blocks(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8]]]:
        for start in range(0, len(self.values), self.block_rows):
            part = slice(start, start + self.block_rows)
            yield self.numbers[part], self.pieces[part], self.values[part]


Decide = Callable[[Step, Any, list[Record]], dict[int, Decision]]


@pytest.fixture
def context(tmp_path: Path) -> Context:
    (tmp_path / "cache").mkdir()
    return Context(seed=3, cache=tmp_path / "cache")


@pytest.fixture
def decide(context: Context, tmp_path: Path) -> Decide:
    """Runs a set step on records; returns its decisions by record number."""
    runs = iter(range(1000))

    def run(step: Step, config: Any, records: list[Record]) -> dict[int, Decision]:
        assert step.sign is not None
        assert step.decide is not None
        rows = step.sign(records, config, context)
        assert len(rows) == len(records)
        counts = [len(part) for part in rows]
        stored = MemorySignatures(
            np.repeat(np.array([record.number for record in records], np.uint64), counts),
            np.repeat(np.array([record.piece for record in records], np.uint32), counts),
            np.concatenate([part for part in rows if len(part)] or [np.empty((0, 1), np.uint8)]),
        )
        directory = tmp_path / f"decide-{next(runs)}"
        directory.mkdir()
        found = list(step.decide(stored, config, context, directory))
        decisions = {decision.number: decision for decision in found}
        assert len(decisions) == len(found)
        reasons = {decision.drop.reason for decision in found if decision.drop}
        assert reasons <= step.reasons.keys()
        return decisions

    return run


class ChatServer:
    """Answers requests for chat completions and counts them.

    Attributes:
        requests: Bodies of all requests, in the order of arrival.
        keys: Values of their Authorization header.
        answer: Body of a request -> text of the answer, or a dict that replaces the whole reply.
        faults: Taken first, one per request: a status, (status, headers), "garbage", "close", "cut", "hang" or None.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answer: Callable[[dict[str, Any]], Any] = lambda body: "yes"
        self.faults: list[Any] = []
        self.usage: dict[str, int] | None = {"prompt_tokens": 10, "completion_tokens": 5}
        self.delay_s = 0.0
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        handler = type("Handler", (_Handler,), {"chat": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def stop(self) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    chat: ChatServer

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply(200, {}, b'{"data": []}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.chat
        with chat.lock:
            chat.requests.append(body)
            chat.keys.append(self.headers.get("Authorization"))
            chat.in_flight += 1
            chat.most_in_flight = max(chat.most_in_flight, chat.in_flight)
            fault = chat.faults.pop(0) if chat.faults else None
        try:
            time.sleep(chat.delay_s)
            answer = chat.answer(body) if fault in (None, "cut") else None
        finally:
            with chat.lock:  # before the client has the answer, because it may send its next request at once
                chat.in_flight -= 1
        self._send(fault, answer)

    def _send(self, fault: Any, answer: Any) -> None:
        if fault == "hang":
            self.chat.stopped.wait(30)
        elif fault == "close":
            self.close_connection = True
        elif fault == "garbage":
            self._reply(200, {}, b"<html>not JSON</html>")
        elif isinstance(fault, int | tuple):
            status, headers = (fault, {}) if isinstance(fault, int) else fault
            self._reply(status, headers, json.dumps({"error": f"key {self.headers.get('Authorization')}"}).encode())
        else:
            choices = [{"message": {"content": answer}, "finish_reason": "stop"}]
            reply = answer if isinstance(answer, dict) else {"choices": choices, "usage": self.chat.usage}
            content = json.dumps(reply).encode()
            self._reply(200, {}, content, cut=fault == "cut")

    def _reply(self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with suppress(ConnectionError):  # a client that was killed or gave up
            self.wfile.write(content[: len(content) // 2] if cut else content)


@pytest.fixture
def chat_server() -> Iterator[ChatServer]:
    """A server of chat completions; it counts requests and can fail on demand."""
    server = ChatServer()
    yield server
    server.stop()


@pytest.fixture
def small_png() -> bytes:
    """An image of 8 x 6 pixels."""
    file = io.BytesIO()
    Image.new("RGB", (8, 6), (200, 30, 40)).save(file, "PNG")
    return file.getvalue()
