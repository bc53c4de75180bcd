# SPDX-License-Identifier: Apache-2.0
"""The predictor asks its model once for each distinct input; real models are tested in mindvl_cli."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation import Item, Predictor


class LastByteDecoder:
    """An image file is 28 pixels high and as many multiples of 28 wide as its last byte says."""

    def read_size(self, content):
        if not content:
            raise EvaluationError("image is empty")
        return 28, 28 * content[-1]

    def decode(self, content):
        return self.read_size(content)

    def resized(self, size, *, multiple, min_pixels, max_pixels):
        assert multiple == 28
        return 28, 28 * min(max(size[1] // 28, min_pixels // 784), max_pixels // 784)


@pytest.fixture
def predictor(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    predictor = Predictor(tmp_path, decoder=LastByteDecoder(), load=lambda *arguments, **options: None)
    images = SimpleNamespace(patch_size=14, merge_size=2, size={"shortest_edge": 784, "longest_edge": 7840})
    predictor.__dict__.update(processor=SimpleNamespace(image_processor=images), fingerprint="f")
    predictor.asked = []

    def answer(batches):
        for number, batch in enumerate(batches):
            predictor.asked.append([question.item.id for question in batch])
            yield number, [question.item.id.upper() for question in batch], 3.0 * len(batch)

    monkeypatch.setattr(predictor, "answer", answer)
    return predictor


def _item(path: Path, name: str, width: int) -> Item:
    image = path / f"{name}.png"
    image.write_bytes(bytes([width]))
    return Item(id=name, task="t", images=(image,), question="<image>", answer="")


def test_each_distinct_input_is_answered_once_and_the_order_is_kept(predictor, tmp_path):
    items = [_item(tmp_path, "b", 2), _item(tmp_path, "a", 9)]
    questions = [q for high in (20, 30) for q in predictor.questions(items, min_pixels=None, max_pixels=high * 784)]
    predictions = predictor.predict(questions)
    assert [p.answer for p in predictions] == ["B", "A", "B", "A"]
    assert [p.seconds for p in predictions] == [3.0] * 4
    assert [p.resized for p in predictions[:2]] == [((28, 56),), ((28, 252),)]
    assert sorted(name for batch in predictor.asked for name in batch) == ["a", "b"]
