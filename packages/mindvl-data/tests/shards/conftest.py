# SPDX-License-Identifier: Apache-2.0
"""Stores on loopback: a real S3 server, and an HTTP server that knows ranges and fails on demand."""

import json
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from mindvl_data.shards import remote


class S3:
    """A bucket of its own on a server of its own."""

    def __init__(self) -> None:
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.server.start()
        host, port = self.server.get_host_and_port()
        self.options = {"endpoint_url": f"http://{host}:{port}", "key": "dummy", "secret": "dummy"}
        self.client = boto3.client(
            "s3",
            endpoint_url=self.options["endpoint_url"],
            aws_access_key_id="dummy",
            aws_secret_access_key="dummy",
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket="bucket")

    def upload(self, directory: Path, prefix: str) -> str:
        """Put a directory into the bucket; returns its address."""
        for path in sorted(directory.iterdir()):
            self.client.put_object(Bucket="bucket", Key=f"{prefix}/{path.name}", Body=path.read_bytes())
        return f"s3://bucket/{prefix}"


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    store = S3()
    yield store
    store.server.stop()


class HttpStore:
    """Objects by path; each request takes the next fault, if there is one. `ranges` lists what was asked for."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults: list[str] = []
        self.ranges: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.release = threading.Event()  # ends a slow answer
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                store.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers.get("Range", "")
        self.ranges.append(asked)
        self.headers.append(dict(request.headers))
        fault = self.faults.pop(0) if self.faults else ""
        content = self.objects.get(request.path)
        if content is None:
            fault = "404"
        if fault.isdigit():
            return self._send(request, int(fault), b"")
        if fault == "slow":
            self.release.wait(60)
        if fault == "release":
            self.release.set()
        assert content is not None
        if fault == "whole":
            return self._send(request, 200, content)
        first, last = (int(value) for value in re.fullmatch(r"bytes=(\d+)-(\d+)", asked).groups())  # type: ignore[union-attr]
        piece = content[first : last + 1]
        if not piece:
            return self._send(request, 416, b"")
        if fault == "drop":
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {first}-{first + len(piece) - 1}/{len(content)}")
            request.send_header("Content-Length", str(len(piece)))
            request.end_headers()
            request.wfile.write(piece[: len(piece) // 2])
            request.wfile.flush()
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)
            return None
        if fault == "short":
            piece = piece[:-1]
        if fault == "wrong-range":
            first += 1
        return self._send(request, 206, piece, f"bytes {first}-{first + len(piece) - 1}/{len(content)}")

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, status: int, body: bytes, content_range: str = "") -> None:
        request.send_response(status)
        if content_range:
            request.send_header("Content-Range", content_range)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)


@pytest.fixture
def http() -> Iterator[HttpStore]:
    store = HttpStore()
    yield store
    store.release.set()
    store.server.shutdown()
    store.server.server_close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between retries, noted instead of slept."""
    noted: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", noted.append)
    return noted


def damage_bytes(content: bytes, generator: random.Random) -> bytes:
    """Bits flipped, a part wiped, the end lost, something added, or nothing left."""
    damaged, place = bytearray(content), generator.randrange(len(content))
    kind = generator.choice(["flip", "flip", "flip", "wipe", "cut", "add", "empty"])
    if kind == "flip":
        for _ in range(generator.choice([1, 1, 5])):
            damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
    elif kind == "wipe":
        damaged[place : place + 8] = bytes(len(damaged[place : place + 8]))
    elif kind == "add":
        damaged[place:place] = generator.randbytes(generator.choice([1, 28, 40]))
    return bytes(damaged[: {"cut": place, "empty": 0}.get(kind, len(damaged))])


def damage_json(content: bytes, generator: random.Random) -> bytes:
    """One value of a JSON file exchanged for one of another kind, taken out, or put in twice."""
    value = json.loads(content)
    places: list[tuple[Any, Any]] = []

    def look(inside: Any) -> None:
        for key in list(inside) if isinstance(inside, dict) else range(len(inside)):
            places.append((inside, key))
            if isinstance(inside[key], dict | list):
                look(inside[key])

    look(value)
    inside, key = generator.choice(places)
    kind = generator.choice(["set", "set", "remove", "repeat", "count"])
    if kind == "remove":
        del inside[key]
    elif kind == "repeat" and isinstance(inside, list):
        inside.insert(key, inside[key])
    elif kind == "count" and isinstance(inside[key], int):
        inside[key] += generator.choice([-1, 1])
    else:
        nan, inf = float("nan"), float("inf")
        inside[key] = generator.choice([None, [], {}, "", "x", "../x.tar", -1, 0, 10**30, 1 << 63, 1.5, nan, inf, True])
    if generator.random() < 0.05:
        return json.dumps(value).replace("0", "[" * 3000, 1).encode()
    return json.dumps(value).encode()


@pytest.fixture
def damage() -> Callable[[bytes, random.Random], bytes]:
    """damage(content, generator): the bytes of a file, JSON or not, damaged somehow."""

    def somehow(content: bytes, generator: random.Random) -> bytes:
        is_json = content.startswith(b"{") and content.count(b"\n{") == 0
        return (damage_json if is_json and generator.random() < 0.6 else damage_bytes)(content, generator)

    return somehow
