# SPDX-License-Identifier: Apache-2.0
"""Answers of an endpoint are kept one by one, images have the searched size, and a judge is asked once for each reply.

tests/commands/test_eval.py of mindvl-cli asks a real server.
"""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation import Endpoint, EndpointConfig, Item, RemotePredictor, endpoint_judge


class Decoder:
    def read_size(self, content):
        width, height = Image.open(io.BytesIO(content)).size
        return height, width

    def decode(self, content):
        return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))

    def resized(self, size, *, multiple, min_pixels, max_pixels):
        side = multiple * 2 if max_pixels < 10_000 else multiple * 4
        return side, side + multiple


AT = EndpointConfig(url="http://localhost:1/v1", model="m", num_workers=2)


@pytest.fixture
def items(tmp_path):
    Image.new("RGB", (50, 40), "red").save(tmp_path / "a.png")
    return [
        Item(
            id=str(number), task="t", question=f"<image>{number}?", answer="x", images=(tmp_path / "a.png",),
            score="exact", box=None,
        )
        for number in range(5)
    ]  # fmt: skip


def test_images_are_sent_at_the_size_of_the_limits(items, monkeypatch):
    sent = []
    monkeypatch.setattr(Endpoint, "ask", lambda self, messages, **_: (sent.append(messages), "x")[1])
    predictor = RemotePredictor(AT, decoder=Decoder())
    predictor.predict(predictor.questions(items[:1], min_pixels=784, max_pixels=5000))
    image, text = sent[0][0]["content"]
    assert text == {"type": "text", "text": "0?"}
    content = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert Image.open(io.BytesIO(content)).size == (84, 56)


def test_what_was_answered_is_not_asked_again_after_a_failure(items, tmp_path, monkeypatch):
    asked = []

    def ask(self, messages, **_):
        text = messages[0]["content"][-1]["text"]
        asked.append(text)
        if text == "3?" and len(asked) < 6:
            raise EvaluationError("http://localhost:1/v1: no answer.")
        return text

    monkeypatch.setattr(Endpoint, "ask", ask)
    cache = tmp_path / "answers.jsonl"
    first = RemotePredictor(AT, decoder=Decoder(), cache=cache)
    with pytest.raises(EvaluationError, match=r"item 3: http://localhost:1/v1: no answer"):
        first.predict(first.questions(items, min_pixels=None, max_pixels=None))
    seen = list(asked)
    again = RemotePredictor(AT, decoder=Decoder(), cache=cache)
    found = again.predict(again.questions(items, min_pixels=None, max_pixels=None))
    assert [one.answer for one in found] == ["0?", "1?", "2?", "3?", "4?"]
    repeated = [text for text in asked[len(seen) :] if text in seen and text != "3?"]
    assert repeated == []


def test_a_judge_is_asked_once_for_each_reply(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Endpoint, "ask", lambda self, messages, **_: (asked.append(1), f"reply {len(asked)}")[1])
    for _ in range(2):
        judge = endpoint_judge(AT, cache=tmp_path / "judge.jsonl")
        assert [judge("p"), judge("p"), judge("q")] == ["reply 1", "reply 2", "reply 3"]
    assert len(asked) == 3
