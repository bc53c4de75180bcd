# SPDX-License-Identifier: Apache-2.0
"""The endpoint client under faults, limits and budgets; the answers themselves come from a small local server."""

import base64
import io
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mindvl_data.curation.endpoint import BudgetError, Endpoint, EndpointConfig, Question, check_endpoint
from mindvl_data.curation.step import ON_WAITING, Context
from mindvl_data.errors import DataError, SampleError


class _Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def endpoint(chat_server: Any, tmp_path: Path, clock: _Clock) -> Any:
    def build(**fields: Any) -> Endpoint:
        config = EndpointConfig(url=chat_server.url, model="m", **({"timeout_s": 120.0} | fields))
        return Endpoint(config, tmp_path / "cache", clock=lambda: clock.now, sleep=clock.sleep)

    return build


def _texts(*names: str, max_tokens: int = 5) -> list[Question]:
    return [Question([name], max_tokens=max_tokens) for name in names]


def _png(width: int, height: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG")
    return file.getvalue()


def test_answers_come_in_the_order_of_questions_and_are_asked_once(chat_server: Any, endpoint: Any) -> None:
    chat_server.answer = lambda body: body["messages"][0]["content"].upper()
    names = [f"q{number}" for number in range(20)]
    client = endpoint()
    assert [reply.text for reply in client.ask_all(_texts(*names))] == [name.upper() for name in names]
    again = endpoint().ask_all(_texts(*names))  # another client with the same cache
    assert [reply.text for reply in again] == [name.upper() for name in names]
    assert all(reply.cached for reply in again)
    assert len(chat_server.requests) == 20


def test_the_same_question_twice_in_a_batch_is_sent_once(chat_server: Any, endpoint: Any) -> None:
    chat_server.delay_s = 0.05
    assert {reply.text for reply in endpoint().ask_all(_texts(*["same"] * 8))} == {"yes"}
    assert len(chat_server.requests) == 1


def test_an_answer_is_kept_by_content_and_not_by_url(chat_server: Any, tmp_path: Path, endpoint: Any) -> None:
    image = _png(4, 4)
    question = Question(["What?", image], max_tokens=5)
    endpoint().ask(question)
    other = EndpointConfig(url="http://127.0.0.1:1/v1", model="m")
    assert Endpoint(other, tmp_path / "cache").ask(question).text == "yes"
    for changed in (
        Question(["What!", image], max_tokens=5),
        Question(["What?", _png(5, 4)], max_tokens=5),
        Question(["What?", image], max_tokens=6),
        Question(["What?", image], max_tokens=5, system="Be brief."),
        Question([image, "What?"], max_tokens=5),
    ):
        endpoint().ask(changed)
    endpoint(temperature=0.5).ask(question)
    endpoint(name="other").ask(question)
    assert len(chat_server.requests) == 8


def test_an_image_is_sent_as_a_data_url_unchanged_or_reduced(chat_server: Any, endpoint: Any) -> None:
    small, large, clear = _png(20, 10), _png(100, 50), _png(20, 10, "RGBA")
    endpoint(max_pixels=1250).ask(Question([small, large, clear, "Compare."], max_tokens=5))
    parts = chat_server.requests[0]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "image_url", "text"]
    urls = [part["image_url"]["url"] for part in parts[:3]]
    assert urls[0] == "data:image/png;base64," + base64.b64encode(small).decode()
    sent = [Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))) for url in urls]
    assert [image.size for image in sent] == [(20, 10), (50, 25), (20, 10)]  # 100 x 50 = 4 x 1250 pixels
    assert sent[2].getpixel((0, 0)) == (255, 255, 255)  # transparent pixels are white, as in training


@pytest.mark.parametrize("fault", [500, 503, 429, "garbage", "close", "cut"])
def test_a_fault_that_passes_is_repeated(fault: Any, chat_server: Any, endpoint: Any, clock: _Clock) -> None:
    chat_server.faults = [fault, fault]
    assert endpoint().ask(*_texts("q")).text == "yes"
    assert len(chat_server.requests) == 3
    assert sum(clock.slept) >= 3.0  # pauses of 1 and 2 seconds


def test_a_request_that_hangs_is_given_up_and_repeated(chat_server: Any, endpoint: Any) -> None:
    chat_server.faults = ["hang"]
    assert endpoint(timeout_s=0.5).ask(*_texts("q")).text == "yes"
    assert len(chat_server.requests) >= 2  # on a busy machine the second answer may be late too


def test_retry_after_pauses_all_processes(chat_server: Any, endpoint: Any, clock: _Clock) -> None:
    first, second = endpoint(), endpoint()  # two clients stand for two processes
    chat_server.faults = [(429, {"Retry-After": "30"})]
    start = clock.now
    sent_at: list[float] = []
    chat_server.answer = lambda body: sent_at.append(clock.now) or "yes"
    first.ask(*_texts("a"))
    assert sent_at[0] >= start + 30
    second.store.pause("m", clock.now + 7)
    first.ask(*_texts("b"))
    assert sent_at[1] >= sent_at[0] + 7


def test_a_question_that_always_fails_is_a_failed_record_if_others_work(chat_server: Any, endpoint: Any) -> None:
    client = endpoint(num_tries=2, concurrency=1)
    chat_server.answer = lambda body: {} if body["messages"][0]["content"] == "poison" else "yes"
    with pytest.raises(SampleError, match="no answer after 2 tries, while other questions are answered"):
        client.ask_all(_texts("a", "poison", "b"))
    assert client.store.find(client._digest(_texts("b")[0])).text == "yes"
    count = len(chat_server.requests)
    with pytest.raises(SampleError):  # the frame asks again, record by record
        client.ask(*_texts("poison"))
    assert len(chat_server.requests) == count


def test_a_server_that_answers_nothing_stops_the_run(chat_server: Any, endpoint: Any) -> None:
    chat_server.faults = [500] * 100
    with pytest.raises(DataError, match="no answer after 2 tries") as raised:
        endpoint(num_tries=2).ask_all(_texts(*"abcdefgh"))
    assert not isinstance(raised.value, SampleError)


@pytest.mark.parametrize(
    ("status", "kind"), [(400, SampleError), (413, SampleError), (401, DataError), (404, DataError)]
)
def test_a_refusal_is_not_repeated(status: int, kind: type, chat_server: Any, endpoint: Any) -> None:
    chat_server.faults = [status]
    with pytest.raises(DataError, match=f"HTTP {status}") as raised:
        endpoint().ask(*_texts("q"))
    assert type(raised.value) is kind
    assert len(chat_server.requests) == 1


def test_a_redirect_is_not_followed(chat_server: Any, endpoint: Any) -> None:
    chat_server.faults = [(307, {"Location": chat_server.url + "/elsewhere"})]
    with pytest.raises(DataError, match="HTTP 307"):
        endpoint().ask(*_texts("q"))
    assert len(chat_server.requests) == 1


def test_the_key_is_sent_and_appears_in_no_message_or_file(
    chat_server: Any, endpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "secret-4711")
    client = endpoint(api_key_env="SOME_KEY")
    client.ask(*_texts("q"))
    assert chat_server.keys == ["Bearer secret-4711"]
    chat_server.faults = [400]  # the server repeats the key in its message
    with pytest.raises(SampleError) as raised:
        client.ask(*_texts("r"))
    assert "4711" not in str(raised.value)
    assert "4711" not in repr(client.config)
    assert all(b"4711" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_missing_key_or_server_is_reported_before_the_run(chat_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_endpoint(EndpointConfig(url=chat_server.url, model="m"))
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(DataError, match="NO_KEY is not set"):
        check_endpoint(EndpointConfig(url=chat_server.url, model="m", api_key_env="NO_KEY"))
    with pytest.raises(DataError, match="does not answer"):
        check_endpoint(EndpointConfig(url="http://127.0.0.1:1/v1", model="m"))
    assert chat_server.requests == []


def test_concurrency_holds_over_all_clients(chat_server: Any, tmp_path: Path) -> None:
    three = threading.Barrier(3)

    def answer(body: dict[str, Any]) -> str:
        three.wait(120)
        return "yes"

    chat_server.answer = answer
    config = EndpointConfig(url=chat_server.url, model="m", concurrency=3)
    clients = [Endpoint(config, tmp_path) for _ in range(3)]
    futures = [
        client._pool.submit(client._answer, *_texts(f"{number}-{n}"))
        for number, client in enumerate(clients)
        for n in range(6)
    ]
    assert [future.result().text for future in futures] == ["yes"] * 18
    assert chat_server.most_in_flight == 3


def test_requests_per_minute_hold_over_all_clients(chat_server: Any, endpoint: Any, clock: _Clock) -> None:
    times: list[float] = []
    chat_server.answer = lambda body: times.append(clock.now) or "yes"
    clients = [endpoint(requests_per_minute=4) for _ in range(2)]
    for number in range(12):
        clients[number % 2].ask(*_texts(f"q{number}"))
        clock.now += 1
    # four at once, then none until the first is a minute old
    assert [round(time - times[0]) for time in times] == [0, 1, 2, 3, 60, 61, 62, 63, 120, 121, 122, 123]


def test_tokens_per_minute_count_what_was_used(chat_server: Any, endpoint: Any, clock: _Clock) -> None:
    chat_server.usage = {"prompt_tokens": 30, "completion_tokens": 10}
    times: list[float] = []
    chat_server.answer = lambda body: times.append(clock.now) or "yes"
    client = endpoint(tokens_per_minute=100)
    for number in range(5):  # 40 used each; the estimate before an answer is 16 + 2 // 3 + 1 + 5 = 22
        client.ask(*_texts(f"q{number}"))
    # 0 and 40 used before the first two; 80 + 22 > 100 before the third
    assert [round(time - times[0]) for time in times] == [0, 0, 60, 60, 120]
    client.ask(Question(["x" * 3000], max_tokens=5))  # larger than the rate: sent alone
    assert len(times) == 6


def test_the_budget_stops_before_it_is_exceeded_and_more_budget_continues(chat_server: Any, endpoint: Any) -> None:
    with pytest.raises(BudgetError, match="budget_requests: 3 of 3 are used"):
        endpoint(budget_requests=3, concurrency=2).ask_all(_texts(*"abcdef"))
    assert len(chat_server.requests) == 3
    with pytest.raises(BudgetError):  # a new process continues to count
        endpoint(budget_requests=3).ask_all(_texts(*"abcdef"))
    assert len(chat_server.requests) == 3
    endpoint(budget_requests=6).ask_all(_texts(*"abcdef"))
    assert len(chat_server.requests) == 6
    assert endpoint().store.spent("m") == (6, 90, 0.0)  # 10 + 5 tokens each


def test_the_budget_counts_tokens_and_money(chat_server: Any, endpoint: Any) -> None:
    chat_server.usage = {"prompt_tokens": 1000, "completion_tokens": 100}
    client = endpoint(prompt_price=2.0, completion_price=10.0, budget_cost=0.0095, concurrency=1)
    client.ask_all(_texts("a", "b"))
    # 2 * (1000 * 2 + 100 * 10) / 1e6 = 0.006; the third may need (16 + 1 + 1) * 2 / 1e6 + 500 * 10 / 1e6 = 0.005036
    with pytest.raises(
        BudgetError, match=r"budget_cost: 0.006 of 0.0095 are used, and the next request may need 0.005036"
    ):
        client.ask(Question(["long"], max_tokens=500))
    with pytest.raises(BudgetError, match="budget_tokens: 2200 of 2200"):
        endpoint(budget_tokens=2200).ask(*_texts("other"))
    assert len(chat_server.requests) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "localhost:8000"}, "url:"),
        ({"url": "http://me:pw@host/v1"}, "without user, password and query"),
        ({"url": "http://host/v1?key=secret"}, r"url: 'http://host/v1' is not"),
        ({"concurrency": 0}, "concurrency:"),
        ({"budget_cost": 1.0}, "needs prompt_price"),
        ({"requests_per_minute": 0}, "requests_per_minute:"),
    ],
)
def test_a_wrong_value_names_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        EndpointConfig(**({"url": "http://x/v1", "model": "m"} | fields))
    assert "pw" not in str(raised.value)


def test_steps_of_a_process_share_the_endpoint(chat_server: Any, tmp_path: Path) -> None:
    context = Context(seed=0, cache=tmp_path)
    config = EndpointConfig(url=chat_server.url, model="m")
    assert Endpoint.of(config, context) is Endpoint.of(config, context)


def test_the_engine_learns_how_long_a_step_waits(chat_server: Any, tmp_path: Path) -> None:
    waited: list[float] = []
    twice = threading.Event()

    def beat(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            twice.set()

    chat_server.answer = lambda body: "yes" if twice.wait(120) else "too late"
    context = Context(seed=0, cache=tmp_path)
    client = Endpoint.of(EndpointConfig(url=chat_server.url, model="m"), context)
    context.resources[ON_WAITING] = beat  # as the engine does for each part
    started = time.monotonic()
    assert [reply.text for reply in client.ask_all(_texts("a", "b"))] == ["yes", "yes"]
    assert 0.4 < sum(waited) <= time.monotonic() - started  # two beats of a quarter of a second, and the rest


def test_pipelines_may_share_answers(chat_server: Any, tmp_path: Path) -> None:
    config = EndpointConfig(url=chat_server.url, model="m", cache=tmp_path / "shared")
    for name in ("one", "two"):
        assert Endpoint.of(config, Context(seed=0, cache=tmp_path / name)).ask(*_texts("q")).text == "yes"
    assert len(chat_server.requests) == 1
