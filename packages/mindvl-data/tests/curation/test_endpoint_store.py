# SPDX-License-Identifier: Apache-2.0
"""Answers on disk and limits between processes, one of which is killed; and the same with a real server.

The server is `transformers serve` with a tiny random Qwen2.5-VL, behind a proxy that counts requests.
"""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

from mindvl_data.curation.endpoint import Endpoint, EndpointConfig, Question
from mindvl_data.curation.endpoint_store import AnswerStore, BudgetError, Expected, Limits, Reply, _rate_wait
from mindvl_data.errors import DataError

_NUM_QUESTIONS = 24
_NUM_BEFORE_KILL = 6
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORKER = """
import json, sys
from pathlib import Path
from mindvl_data.curation.endpoint import Endpoint, EndpointConfig, Question
url, model, directory, step = sys.argv[1:]
images = [path.read_bytes() for path in sorted(Path(directory).glob("*.png"))][:: int(step)]
endpoint = Endpoint(EndpointConfig(url=url, model=model, concurrency=3, timeout_s=600.0), Path(directory) / "cache")
for start in range(0, len(images), 4):
    batch = [Question([image, "read the number"], max_tokens=12) for image in images[start : start + 4]]
    for reply in endpoint.ask_all(batch):
        print(json.dumps(reply.text), flush=True)
"""
_ANSWERS_AND_DIES = """
import os, signal, sys
from pathlib import Path
from mindvl_data.curation.endpoint_store import AnswerStore, Expected, Limits, Reply
store, expected = AnswerStore(Path(sys.argv[1])), Expected(30, 0.5, 1000.0)
for key in ("answered", "lost"):
    assert store.admit(key, "e", Limits(concurrency=2), expected, 0.0) == 0.0
store.answered("answered", "e", Reply("paid", "stop", 3, 4), 0.25)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_answer_survives_kill_and_a_lost_request_frees_its_place(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", _ANSWERS_AND_DIES, str(tmp_path)], check=False)
    assert process.returncode == -signal.SIGKILL
    store = AnswerStore(tmp_path)
    assert store.find("answered") == Reply("paid", "stop", 3, 4, cached=True)
    limits, expected = Limits(concurrency=1), Expected(30, 0.5, 1000.0)
    assert store.admit("answered", "e", limits, expected, 1.0) == Reply("paid", "stop", 3, 4, cached=True)
    assert store.admit("lost", "e", limits, expected, 1.0) == 0.0  # at once, not after its timeout
    # three requests; 7 tokens for the answer and 30 for the lost request, which the server may have charged
    assert store.spent("e") == (3, 37, 0.75)


def test_a_question_in_flight_is_waited_for(tmp_path: Path) -> None:
    first, second = AnswerStore(tmp_path), AnswerStore(tmp_path)
    limits, expected = Limits(concurrency=9), Expected(1, 0.0, 10.0)
    assert first.admit("q", "e", limits, expected, 0.0) == 0.0
    assert second.admit("q", "e", limits, expected, 0.0) == pytest.approx(0.1)
    first.answered("q", "e", Reply("a", "stop", 1, 1), 0.0)
    assert second.admit("q", "e", limits, expected, 0.0) == Reply("a", "stop", 1, 1, cached=True)


def test_a_full_disk_stops_the_run_instead_of_failing_single_records(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    store._database.execute("PRAGMA max_page_count=1")  # no file may grow: what SQLite reports for a full disk

    with pytest.raises(DataError, match=r"full\. Check the disk"):
        store.answered("key", "model", Reply("x" * 100_000, "stop", 1, 1), 0.0)
    assert store.find("key") is None


def test_a_request_waits_while_those_in_flight_may_use_the_rest_of_the_budget(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    limits, expected = Limits(concurrency=9, budget_tokens=100), Expected(60, 0.0, 10.0)
    assert store.admit("a", "e", limits, expected, 0.0) == 0.0
    assert store.admit("b", "e", limits, expected, 0.0) == pytest.approx(0.1)  # 60 reserved + 60 > 100
    store.answered("a", "e", Reply("", "stop", 20, 20), 0.0)
    assert store.admit("b", "e", limits, expected, 0.0) == 0.0  # 40 used + 60
    store.failed("b", "e", 1, 0.0)
    with pytest.raises(BudgetError, match="41 of 100 are used, and the next request may need 60"):
        store.admit("c", "e", limits, expected, 0.0)


def test_endpoints_have_their_own_limits(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    limits, expected = Limits(concurrency=1), Expected(1, 0.0, 10.0)
    store.pause("e", 50.0)
    assert store.admit("a", "e", limits, expected, 20.0) == 30.0
    assert store.admit("a", "f", limits, expected, 20.0) == 0.0
    store.pause("e", 40.0)  # does not shorten a pause
    assert store.admit("b", "e", limits, expected, 20.0) == 30.0


def test_the_wait_for_a_rate_ends_when_enough_of_the_last_minute_has_passed() -> None:
    used = [(0.0, 30), (10.0, 30), (20.0, 30)]
    assert _rate_wait(used, 10, 100, 30.0) == 0.0
    assert _rate_wait(used, 40, 100, 30.0) == 30.0  # until 60, when the first 30 no longer count
    assert _rate_wait(used, 41, 100, 30.0) == 40.0
    assert _rate_wait(used, 1000, 100, 30.0) == 50.0
    assert _rate_wait([], 1000, 100, 30.0) == 0.0
    assert _rate_wait(used, 1000, None, 30.0) == 0.0


class _CountingProxy:
    """Passes requests on to a server, and counts those of each question.

    Attributes:
        asked: Number of requests by question.
        answers: Requests are passed on as long as it can be acquired, and wait after that.
    """

    def __init__(self, target: str) -> None:
        self.asked: Counter[str] = Counter()
        self.answers = threading.Semaphore(_NUM_BEFORE_KILL)
        lock = threading.Lock()
        asked, answers = self.asked, self.answers

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with lock:
                    asked[sha256(json.dumps(json.loads(body)["messages"]).encode()).hexdigest()] += 1
                answers.acquire()
                headers = {"Content-Type": "application/json"}
                request = urllib.request.Request(f"{target}/chat/completions", body, headers)
                with urllib.request.urlopen(request, timeout=600) as reply:
                    content = reply.read()
                with suppress(ConnectionError):  # of a killed process
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def model_directory(tmp_path: Path, hf: PreTrainedTokenizerFast, tiny_qwen2_5_vl: Any) -> Path:
    """A model whose short answers depend on the image."""
    directory = tmp_path / "model"
    with torch.no_grad():
        for parameter in tiny_qwen2_5_vl.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    tiny_qwen2_5_vl.generation_config.eos_token_id = [2, *range(20, 80)]
    tiny_qwen2_5_vl.eval().save_pretrained(directory)
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size={"shortest_edge": 784, "longest_edge": 16 * 784}),
        tokenizer=hf,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=_TEMPLATE,
    ).save_pretrained(directory)
    return directory


@pytest.fixture
def served(model_directory: Path) -> Iterator[str]:
    """The URL of the server."""
    with socket.socket() as holder:  # so that no other process gets the port before the server listens
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        program = Path(sys.executable).parent / "transformers"
        command = [program, "serve", model_directory, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
        process = subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
        try:
            deadline = time.monotonic() + 600
            while True:
                with socket.socket() as attempt:
                    if attempt.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None, "transformers serve ended"
                assert time.monotonic() < deadline
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def proxy(served: str) -> Iterator[_CountingProxy]:
    proxy = _CountingProxy(served)
    yield proxy
    proxy.stop()


def _start(proxy: _CountingProxy, model: Path, directory: Path) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _WORKER, proxy.url, str(model), str(directory)]
    return [subprocess.Popen([*command, step], stdout=subprocess.PIPE, text=True) for step in ("1", "-1")]


def _num_answers(directory: Path) -> int:
    path = directory / "cache" / "endpoint-answers.sqlite"
    if not path.exists():
        return 0
    database = sqlite3.connect(path, timeout=30)
    try:
        return int(database.execute("SELECT count(*) FROM answers").fetchone()[0])
    except sqlite3.OperationalError:  # the table does not exist yet
        return 0
    finally:
        database.close()


@pytest.mark.slow
def test_no_answer_is_asked_for_twice_by_two_processes_that_are_killed_and_repeated(
    proxy: _CountingProxy, model_directory: Path, tmp_path: Path
) -> None:
    for number in range(_NUM_QUESTIONS):
        pixels = np.random.default_rng(number).integers(0, 256, (56, 56, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number:02d}.png")

    workers = _start(proxy, model_directory, tmp_path)
    deadline = time.monotonic() + 600
    while (_num_answers(tmp_path), sum(proxy.asked.values())) != (_NUM_BEFORE_KILL, _NUM_BEFORE_KILL + 3):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # Stopped first: one that runs would ask for the lost answers of the other one.
    for worker in workers:
        worker.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, worker.pid, os.WSTOPPED)
    for worker in workers:
        worker.kill()
        worker.wait()
    answered, before = _num_answers(tmp_path), Counter(proxy.asked)
    assert answered == _NUM_BEFORE_KILL
    assert max(before.values()) == 1  # two processes with the same questions
    assert len(before) == answered + 3  # `concurrency` requests were in flight and are lost
    proxy.answers.release(1000)

    outputs = [worker.communicate(timeout=600)[0].splitlines() for worker in _start(proxy, model_directory, tmp_path)]
    assert len(outputs[0]) == _NUM_QUESTIONS
    assert outputs[0] == outputs[1][::-1]
    assert len(set(outputs[0])) > 3  # answers depend on the image
    assert len(proxy.asked) == _NUM_QUESTIONS
    again = proxy.asked - before  # requests of the second run
    assert sum(again.values()) == _NUM_QUESTIONS - answered
    assert max(proxy.asked.values()) <= 2

    total = sum(proxy.asked.values())
    for worker in _start(proxy, model_directory, tmp_path):
        assert worker.communicate(timeout=600)[0].splitlines() in outputs
    assert sum(proxy.asked.values()) == total  # a third run asks nothing

    config = EndpointConfig(url=proxy.url, model=str(model_directory), budget_requests=total)
    endpoint = Endpoint(config, tmp_path / "cache")
    with pytest.raises(BudgetError, match=f"budget_requests: {total} of {total} are used"):
        endpoint.ask(Question(["one more"], max_tokens=4))
    assert sum(proxy.asked.values()) == total
