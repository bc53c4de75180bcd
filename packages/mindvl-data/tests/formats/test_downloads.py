# SPDX-License-Identifier: Apache-2.0
"""Images at addresses, from a server of this process."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mindvl_data.errors import SampleError
from mindvl_data.formats import downloads
from mindvl_data.formats.downloads import Downloads


class _Handler(BaseHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012 - shared with the test on purpose

    def do_GET(self) -> None:
        self.asked.append(self.path)
        busy = self.path == "/busy" and self.asked.count("/busy") < 3
        self.send_response(503 if busy else 404 if self.path == "/missing" else 200)
        self.end_headers()
        self.wfile.write(b"x" * (2000 if self.path == "/large" else 10))

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(downloads, "_WAIT_S", 0.0)
    monkeypatch.setattr(downloads, "MAX_BYTES", 1000)
    _Handler.asked.clear()
    running = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


def test_a_file_is_downloaded_once_and_tried_again_while_the_server_is_busy(server: str, tmp_path: Path) -> None:
    cache = Downloads(tmp_path / "cache")
    assert cache.read(f"{server}/a") == b"x" * 10
    assert Downloads(tmp_path / "cache").read(f"{server}/a") == b"x" * 10
    assert _Handler.asked == ["/a"]
    assert cache.read(f"{server}/busy") == b"x" * 10
    assert _Handler.asked.count("/busy") == 3


@pytest.mark.parametrize(("path", "reason"), [("missing", "HTTP status 404"), ("large", "more than 1000 bytes")])
def test_what_cannot_be_read_is_a_bad_sample_and_leaves_no_file(
    server: str, tmp_path: Path, path: str, reason: str
) -> None:
    with pytest.raises(SampleError, match=reason):
        Downloads(tmp_path).read(f"{server}/{path}")
    assert list(tmp_path.iterdir()) == []
    assert len(_Handler.asked) == 1


def test_a_server_that_does_not_exist_is_named_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_WAIT_S", 0.0)
    with pytest.raises(SampleError, match="cannot be downloaded") as caught:
        Downloads(tmp_path).read("http://user:pa55@127.0.0.1:9/a.png")
    assert "pa55" not in str(caught.value)
