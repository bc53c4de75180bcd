# SPDX-License-Identifier: Apache-2.0
"""Ask a model behind an OpenAI-compatible endpoint: vLLM, vllm-ascend, SGLang, `transformers serve`, or a hosted one.

Used by remote.py for benchmark items and by the metrics that need a judge. Requests that time out, are refused for their rate
(429) or fail in the server (5xx) are repeated with growing pauses; any other failure stops with an error.
"""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from mindvl_merge.errors import EvaluationError, RequestRefusedError

_MAX_REPLY_BYTES = 10_000_000
_MAX_PAUSE_S = 60.0
_MAY_PASS = (408, 409, 425, 429)  # besides 5xx
_ABOUT_REQUEST = (400, 413, 422)  # codes that concern one request; others, such as 401, concern all


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Where and how to ask."""

    url: str  # base URL such as http://localhost:8000/v1
    model: str  # name of the model at the endpoint
    api_key: str | None = None
    num_workers: int = 8  # requests at the same time
    timeout_s: float = 300.0  # of one request
    num_tries: int = 6

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise EvaluationError(
                f"--endpoint: {self.url!r:.200} is not a URL. Write for example http://localhost:8000/v1."
            )
        if self.num_workers < 1 or self.num_tries < 1 or not self.timeout_s > 0:
            raise EvaluationError(
                f"{self.url}: num_workers, num_tries and timeout_s must be positive, got {self.num_workers}, {self.num_tries} "
                f"and {self.timeout_s}. Correct them."
            )


class Endpoint:
    """Chat completions, safe in several threads.

    Args:
        sleep: Waits between two tries; for tests.
    """

    def __init__(self, config: EndpointConfig, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.config = config
        self._sleep = sleep
        self._free_at = 0.0  # no request is sent before; set when the server asks to slow down
        self._lock = threading.Lock()

    def ask(self, messages: Sequence[dict[str, Any]], *, max_new_tokens: int) -> str:
        """The reply to a conversation, by greedy decoding.

        Raises:
            RequestRefusedError: The endpoint refuses this request.
            EvaluationError: The endpoint refuses all requests, or does not answer after all tries.
        """
        body = {
            "model": self.config.model, "messages": list(messages), "max_tokens": max_new_tokens, "temperature": 0.0,
        }  # fmt: skip
        reason = ""
        for attempt in range(self.config.num_tries):
            self._wait(attempt)
            try:
                content = self._post(body)
                text = _text(content)
                if text is not None:
                    return text
                reason = f"the reply is not a chat completion: {_shown(content)}"
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {_shown(_body(error))}"
                if error.code < 500 and error.code not in _MAY_PASS:
                    kind = RequestRefusedError if error.code in _ABOUT_REQUEST else EvaluationError
                    url = "the URL, which ends in /v1 at most servers, " if error.code == HTTPStatus.NOT_FOUND else ""
                    raise kind(
                        f"{self.config.url}: refuses the request ({reason}). Check {url}the model name, the key and the "
                        "length of the prompt."
                    ) from error
                self._slow_down(error.headers.get("Retry-After"))
            except (OSError, http.client.HTTPException) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise EvaluationError(
            f"{self.config.url}: no answer after {self.config.num_tries} tries ({reason[:300]}). Check that the server runs, and "
            "run the command again: answers so far are kept with --out."
        )

    def _post(self, body: dict[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.config.api_key:
            headers["Authorization"] = f"Bearer {self.config.api_key}"
        url = f"{self.config.url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self.config.timeout_s) as reply:
            content: bytes = reply.read(_MAX_REPLY_BYTES)  # a longer reply is cut, and then is no JSON
        return content

    def _wait(self, attempt: int) -> None:
        with self._lock:
            pause = max(0.0, self._free_at - time.monotonic())
        if attempt:
            pause = max(pause, min(_MAX_PAUSE_S, 0.5 * 2**attempt))
        if pause > 0:
            self._sleep(pause)

    def _slow_down(self, retry_after: str | None) -> None:
        try:
            seconds = min(_MAX_PAUSE_S, float(retry_after or 0))
        except ValueError:  # a date
            seconds = _MAX_PAUSE_S
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic() + seconds)


def _text(content: bytes) -> str | None:
    """The text of a reply; None if it is not a chat completion."""
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    if text is None:  # for example only reasoning, or cut before the first token
        return ""
    if not isinstance(text, str):
        return None
    return text.encode(errors="replace").decode()  # half of a surrogate pair could not be written to a file


def _body(error: urllib.error.HTTPError) -> bytes:
    """The beginning of the body of an error; empty if the connection ends before."""
    try:
        return error.read(2000)
    except (OSError, http.client.HTTPException):
        return b""


def _shown(content: bytes) -> str:
    text = content.decode(errors="backslashreplace")[:200]
    return text if text.isprintable() else repr(text)
