# SPDX-License-Identifier: Apache-2.0
"""Ask a model behind an OpenAI-compatible endpoint: vLLM, vllm-ascend, SGLang, `transformers serve`, or a hosted one.

Used by the steps that need a large model (re-captions, scores, annotations). Requests that time out, are refused for
their rate (429) or fail in the server (5xx) are repeated with growing pauses. Answers are kept by content
(endpoint_store.py), so that an answer that was received is never asked for again, in this run or a later one.

A step does, for a batch of records:

    endpoint = Endpoint.of(config.endpoint, context)
    replies = endpoint.ask_each(records, lambda record: Question([record.media[0], "Describe the image."], max_tokens=512))
"""

import http.client
import json
import threading
import time
import urllib.error
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mindvl_data.config import ImageConfig
from mindvl_data.curation.endpoint_http import (
    api_key,
    check_server,
    image_url,
    parse_reply,
    post,
    retry_after,
    shown,
)
from mindvl_data.curation.endpoint_store import AnswerStore, BudgetError, Expected, Limits, Reply
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import ON_WAITING, Context
from mindvl_data.errors import DataError, SampleError
from mindvl_data.preprocessing import WITHOUT_MODEL

__all__ = ["BudgetError", "Endpoint", "EndpointConfig", "Question", "Reply", "check_endpoint"]

_MAX_PAUSE_S = 60.0
_MAY_PASS = (408, 409, 425, 429)  # besides 5xx
_RECORD_REFUSED = (400, 413, 415, 422)  # the fault of one question; any other 4xx concerns all
_PIXELS_PER_TOKEN = WITHOUT_MODEL.token_pixels  # only for estimates before the server has counted
_BEAT_S = 0.25  # between two signs of life to the engine
_CONTROL = "Reply with the word OK."


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Where and how to ask. All limits hold over all worker processes and, the budget, over all runs of a pipeline.

    Attributes:
        url: Base URL, for example http://localhost:8000/v1.
        model: Name of the model at the endpoint.
        name: Name under which answers and spending are kept; "" means the name of the model. Answers stay valid when
            only the URL changes.
        cache: Directory of answers, on a disk of this machine; by default OUT/cache of the pipeline. Name one to use
            answers in several pipelines.
        api_key_env: Environment variable that holds the API key. The key itself is never written anywhere.
        concurrency: Requests in flight at the same time.
        timeout_s: Longest duration of one request in seconds.
        num_tries: Tries of one request that fails for a reason that may pass.
        requests_per_minute, tokens_per_minute: Rates; tokens are those of prompts and answers.
        budget_requests, budget_tokens, budget_cost: The run stops before it exceeds them; repeated requests count.
        prompt_price, completion_price: Price of a million tokens, in the unit of `budget_cost`.
        max_pixels: Larger images are reduced before they are sent (default: the maximum of Qwen2.5-VL).
        temperature: 0 for greedy decoding.
    """

    url: str
    model: str
    name: str = ""
    cache: Path | None = None
    api_key_env: str | None = None
    concurrency: int = 8
    timeout_s: float = 300.0
    num_tries: int = 6
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    budget_requests: int | None = None
    budget_tokens: int | None = None
    budget_cost: float | None = None
    prompt_price: float = 0.0
    completion_price: float = 0.0
    max_pixels: int = ImageConfig().max_pixels
    temperature: float = 0.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        is_plain = not (parts.query or parts.fragment or "@" in parts.netloc)  # nothing that may be a secret
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
            shown_url = self.url.rpartition("@")[2].partition("?")[0]
            raise ValueError(
                f"url: {shown_url!r:.200} is not a base URL without user, password and query. Write for example "
                "http://localhost:8000/v1, and name the variable of an API key in api_key_env."
            )
        for name in ("concurrency", "num_tries", "timeout_s", "max_pixels"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be positive, got {getattr(self, name)}. Correct it.")
        for name in ("requests_per_minute", "tokens_per_minute", "budget_requests", "budget_tokens", "budget_cost"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be positive, got {getattr(self, name)}. Remove it for no limit.")
        for name in ("prompt_price", "completion_price", "temperature"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: must not be negative, got {getattr(self, name)}. Correct it.")
        if self.budget_cost is not None and not self.prompt_price + self.completion_price > 0:
            raise ValueError("budget_cost: needs prompt_price and completion_price per million tokens. Set them.")

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Price of a request."""
        return (prompt_tokens * self.prompt_price + completion_tokens * self.completion_price) / 1e6


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        parts: Texts (str) and encoded images (bytes), in order.
        max_tokens: Longest answer in tokens.
        system: System message; "" for none.
        history: (role, parts) of the messages before.
    """

    parts: Sequence[str | bytes]
    max_tokens: int
    system: str = ""
    history: Sequence[tuple[str, Sequence[str | bytes]]] = ()

    def messages(self) -> list[tuple[str, list[str | bytes]]]:
        """(role, parts) of all messages."""
        turns = [("system", [self.system])] if self.system else []
        return [(role, list(parts)) for role, parts in (*turns, *self.history, ("user", self.parts))]


class Endpoint:
    """Chat completions with a cache, safe in several threads and processes.

    Args:
        config: Where and how to ask.
        cache: Directory of answers, on a disk of this machine; shared by all processes of a run.
        resources: `Context.resources`, so that the engine learns that a step waits for answers.
        clock, sleep: Time in seconds and waiting; for tests.
    """

    def __init__(
        self,
        config: EndpointConfig,
        cache: Path,
        *,
        resources: dict[Any, Any] | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config = config
        self.name = config.name or config.model
        self.store = AnswerStore(cache)
        self._limits = Limits(**{name: getattr(config, name) for name in Limits.__dataclass_fields__})
        self._resources = {} if resources is None else resources
        self._clock, self._sleep = clock, sleep
        self._key = api_key(config.url, config.api_key_env)
        self._admission = threading.Lock()  # one thread of a process at a time waits for the limits
        self._pool = ThreadPoolExecutor(config.concurrency, thread_name_prefix="endpoint")
        self._failures: dict[str, str] = {}  # questions that failed in this process are not tried again
        self._stopped: DataError | None = None  # the error after which this process asks nothing more

    @classmethod
    def of(cls, config: EndpointConfig, context: Context) -> "Endpoint":
        """The endpoint of this process for a step."""
        return context.resource(
            ("endpoint", config),
            lambda: cls(config, config.cache or context.answers or context.cache, resources=context.resources),
        )

    def ask_all(self, questions: Sequence[Question]) -> list[Reply]:
        """The answers to several questions, asked at the same time.

        Raises:
            SampleError: The endpoint refuses a question, or fails with it while it answers others; all others have been
                asked and their answers kept.
            BudgetError: The budget is used up.
            DataError: The endpoint does not work.
        """
        futures = [self._pool.submit(self._answer, question) for question in questions]
        pending: set[Future[Reply]] = set(futures)
        while pending:
            started = time.monotonic()
            _, pending = wait(pending, timeout=_BEAT_S)
            self._resources.get(ON_WAITING, _ignore)(time.monotonic() - started)
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:  # an error that concerns all questions comes first
            raise min(errors, key=lambda error: isinstance(error, SampleError))
        return [future.result() for future in futures]

    def ask_each(self, records: Sequence[Record], question: Callable[[Record], Question | None]) -> list[Reply | None]:
        """The answers to one question about each record; None where `question` returns None.

        Raises:
            SampleError: A question cannot be made or fails; those of all other records have been asked.
            BudgetError, DataError: As in `ask_all`.
        """
        questions: list[Question | None] = []
        failures: list[SampleError] = []
        for record in records:
            try:
                questions.append(question(record))
            except SampleError as error:
                failures.append(error)
        replies = iter(self.ask_all([one for one in questions if one is not None]))
        if failures:
            raise failures[0]
        return [None if one is None else next(replies) for one in questions]

    def ask(self, question: Question) -> Reply:
        """The answer to a question; errors as in `ask_all`."""
        return self.ask_all([question])[0]

    def _answer(self, question: Question) -> Reply:
        key = self._digest(question)
        reply = self.store.find(key)
        if reply is not None:
            return reply
        if key in self._failures:
            raise SampleError(self._failures[key])
        if self._stopped is not None:
            raise self._stopped
        body, expected = self._request(question)
        try:
            return self._ask(key, body, expected)
        except SampleError as error:
            self._failures[key] = str(error)
            raise
        except DataError as error:
            self._stopped = error
            raise

    def _ask(self, key: str, body: bytes, expected: Expected, *, is_control: bool = False) -> Reply:
        reason, pause = "", 0.0
        num_tries = 1 if is_control else self.config.num_tries
        for attempt in range(num_tries):
            if attempt:
                self._sleep(pause)
            pause = min(_MAX_PAUSE_S, 2.0**attempt)
            known = self._admitted(key, expected)
            if known is not None:
                return known
            tokens, cost, answered = 0, 0.0, False
            try:
                reply = parse_reply(post(self.config.url, self._key, body, self.config.timeout_s), expected.tokens)
                answered = True
                self.store.answered(
                    key, self.name, reply, self.config.cost(reply.prompt_tokens, reply.completion_tokens)
                )
                return reply
            except urllib.error.HTTPError as error:
                reason = self._refusal(error, pause)
            except SampleError as error:
                reason, tokens, cost = str(error), expected.tokens, expected.cost  # it may have been charged
            except (OSError, http.client.HTTPException) as error:
                cause = getattr(error, "reason", error)
                reason = self._hidden(str(cause) or type(cause).__name__)
                if not isinstance(cause, ConnectionRefusedError):
                    tokens, cost = expected.tokens, expected.cost
            finally:
                if not answered:
                    self.store.failed(key, self.name, tokens, cost)
        if is_control or not self._works():
            raise DataError(
                f"{self.config.url}: no answer after {num_tries} tries ({reason}). Check that the server runs, and run the "
                "command again: answers so far are kept."
            )
        raise SampleError(
            f"{self.name}: no answer after {num_tries} tries, while other questions are answered: {reason}"
        )

    def _works(self) -> bool:
        """Whether the endpoint answers another question, so that the one that failed is at fault."""
        body, expected = self._request(Question([_CONTROL], max_tokens=8))
        try:
            self._ask(
                f"control {self.store.owner} {threading.get_ident()} {self._clock()}", body, expected, is_control=True
            )
        except BudgetError:
            raise
        except DataError:
            return False
        return True

    def _admitted(self, key: str, expected: Expected) -> Reply | None:
        """Wait until the request may be sent; returns the answer if another process has received it by then."""
        while True:
            with self._admission:
                outcome = self.store.admit(key, self.name, self._limits, expected, self._clock())
                if isinstance(outcome, Reply):
                    return outcome
                if outcome > 0:
                    self._sleep(min(outcome, 1.0))
            if outcome == 0:
                return None

    def _refusal(self, error: urllib.error.HTTPError, pause: float) -> str:
        """The reason of a refusal that may pass. After a refusal for the rate, all processes pause.

        Raises:
            SampleError: The endpoint refuses this question.
            DataError: It refuses all questions.
        """
        try:
            content = error.read(2000)
        except (OSError, http.client.HTTPException):
            content = b""
        reason = f"HTTP {error.code}: {self._hidden(shown(content))}"
        if error.code in _RECORD_REFUSED:
            raise SampleError(f"{self.name}: the endpoint refuses the question ({reason})") from error
        if error.code < 500 and error.code not in _MAY_PASS:
            raise DataError(
                f"{self.config.url}: refuses the request ({reason}). Check the URL, the model's name {self.config.model!r} and "
                "the key in api_key_env."
            ) from error
        seconds = retry_after(error.headers.get("Retry-After"), self._clock())
        if error.code == 429:
            seconds = max(seconds, pause)
        if seconds > 0:
            self.store.pause(self.name, self._clock() + min(_MAX_PAUSE_S, seconds))
        return reason

    def _hidden(self, text: str) -> str:
        """The text without the key, which some servers repeat in their messages."""
        return (text.replace(self._key, "***") if self._key else text)[:300]

    def _digest(self, question: Question) -> str:
        """Key of the answer: everything that determines it except the URL."""
        messages = [
            (role, [part if isinstance(part, str) else {"image": sha256(part).hexdigest()} for part in parts])
            for role, parts in question.messages()
        ]
        content = [
            self.name, self.config.model, self.config.max_pixels, self.config.temperature, question.max_tokens, messages,
        ]  # fmt: skip
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _request(self, question: Question) -> tuple[bytes, Expected]:
        """The body of the request and what it is expected to use."""
        prompt_tokens = 16
        messages: list[dict[str, Any]] = []
        for role, parts in question.messages():
            content: list[dict[str, Any]] = []
            for part in parts:
                if isinstance(part, str):
                    content.append({"type": "text", "text": part})
                    prompt_tokens += len(part.encode(errors="replace")) // 3 + 1
                else:
                    url, pixels = image_url(part, self.config.max_pixels)
                    content.append({"type": "image_url", "image_url": {"url": url}})
                    prompt_tokens += pixels // _PIXELS_PER_TOKEN + 1
            is_text = all(isinstance(part, str) for part in parts)  # as a string, which any server takes
            messages.append({"role": role, "content": "\n".join(map(str, parts)) if is_text else content})
        body = {
            "model": self.config.model, "messages": messages, "max_tokens": question.max_tokens,
            "temperature": self.config.temperature,
        }  # fmt: skip
        expected = Expected(
            prompt_tokens + question.max_tokens,
            self.config.cost(prompt_tokens, question.max_tokens),
            self.config.timeout_s,
        )
        return json.dumps(body).encode(), expected


def check_endpoint(config: EndpointConfig) -> None:
    """Check that the key is set and that a server listens, before a run starts; for `Step.prepare`.

    Raises:
        DataError: The variable of the key is not set, nothing listens, or the key is refused.
    """
    check_server(config.url, api_key(config.url, config.api_key_env), config.api_key_env)


def _ignore(seconds: float) -> None:
    """Outside of an engine nothing has to know that a step waits."""
