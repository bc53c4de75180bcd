# SPDX-License-Identifier: Apache-2.0
"""Servers that fail in every way: what may pass is tried again, what cannot is an error, and nothing is read as an answer."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation import Endpoint, EndpointConfig

GOOD = (200, {"choices": [{"message": {"content": "4071"}}]})


@pytest.fixture
def server():
    """Answers with the given replies in turn, then with the last one; keeps the requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            replies, requests = self.server.replies, self.server.requests
            requests.append((self.path, dict(self.headers), json.loads(body)))
            status, document, *headers = replies[min(len(requests), len(replies)) - 1]
            if status is None:
                return  # closes the connection without an answer
            content = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.replies, server.requests = [GOOD], []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def _ask(server, **values):
    pauses = []
    url = f"http://127.0.0.1:{server.server_port}/v1/"
    endpoint = Endpoint(EndpointConfig(url=url, model="m", num_tries=3, timeout_s=120, **values), sleep=pauses.append)
    return endpoint.ask([{"role": "user", "content": "?"}], max_new_tokens=7), pauses


def test_a_request_is_greedy_and_carries_the_key(server):
    assert _ask(server, api_key="secret") == ("4071", [])
    path, headers, body = server.requests[0]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 7, 0.0)


@pytest.mark.parametrize(
    "failure",
    [(500, b"x"), (503, {}), (429, {}), (None, b""), (200, b"<html>"), (200, {"choices": []}), (200, b"[" * 100_000)],
)
def test_failures_that_may_pass_are_tried_again(server, failure):
    server.replies = [failure, failure, GOOD]
    answer, pauses = _ask(server)
    assert answer == "4071"
    assert pauses == pytest.approx([1.0, 2.0])


def test_a_server_decides_how_long_to_wait(server):
    server.replies = [(429, {}, ("Retry-After", "7")), GOOD]
    assert _ask(server)[1] == pytest.approx([7], abs=0.5)


@pytest.mark.parametrize("reply", [(200, {"choices": [{"message": {"content": None}}]})])
def test_no_content_is_an_empty_answer(server, reply):
    server.replies = [reply]
    assert _ask(server)[0] == ""


def test_failures_that_stay_are_an_error_with_the_reason(server):
    server.replies = [(500, b"out of memory")]
    with pytest.raises(EvaluationError, match=r"no answer after 3 tries \(HTTP 500: out of memory\)"):
        _ask(server)
    server.replies = [(200, {"choices": [{"message": {"content": 5}}]})]
    with pytest.raises(EvaluationError, match="the reply is not a chat completion"):
        _ask(server)


@pytest.mark.parametrize("status", [400, 401, 404, 413])
def test_a_refused_request_is_not_repeated(server, status):
    server.replies = [(status, b"no\x1b[31m")]
    with pytest.raises(EvaluationError, match=rf"refuses the request \(HTTP {status}") as caught:
        _ask(server)
    assert str(caught.value).isprintable()
    assert ("the URL, which ends in /v1" in str(caught.value)) == (status == 404)
    assert len(server.requests) == 1


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "", "http://"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(EvaluationError, match=r"--endpoint: .* is not a URL"):
        EndpointConfig(url=url, model="m")


def test_half_a_surrogate_pair_is_replaced_and_a_cut_error_is_tried_again(server):
    server.replies = [
        (500, b"short", ("Content-Length", "4000")),
        (200, b'{"choices": [{"message": {"content": "a\\ud83d"}}]}'),
    ]
    assert _ask(server)[0] == "a?"
