# SPDX-License-Identifier: Apache-2.0
"""Answers of a tiny model: batches, cache, sizes."""

import pytest
from PIL import Image

from mindvl_cli.evaluation.benchmark import load_benchmarks
from mindvl_cli.evaluation.predict import PredictConfig, Predictor, image_size
from mindvl_cli.failures import CliError


@pytest.fixture
def items(benchmark_file):
    return load_benchmarks(benchmark_file)[0].items


def _predictor(model_folder, cache=None, **values):
    return Predictor(
        model_folder, config=PredictConfig(**{"max_new_tokens": 4, "device": "cpu", **values}), cache=cache
    )


def test_batches_give_the_answers_of_single_items(model_folder, items):
    together, alone = _predictor(model_folder), _predictor(model_folder, batch_size=1)
    questions = together.questions(items, min_pixels=None, max_pixels=None)
    assert [p.answer for p in together.predict(questions)] == [p.answer for p in alone.predict(questions)]


def test_sizes_are_those_of_the_processor_and_follow_the_limits(model_folder, items):
    predictor = _predictor(model_folder)
    assert predictor.default_limits == (4 * 784, 16 * 784)
    assert predictor.sizes(items[2], 784, 100 * 784) == ((84, 196),)  # 90x200 to multiples of 28
    questions = predictor.questions(items, min_pixels=784, max_pixels=9 * 784)
    predictions = predictor.predict(questions)
    assert all(h * w <= 9 * 784 for p in predictions for h, w in p.resized)
    assert predictions[2].original == ((90, 200),)
    with pytest.raises(CliError, match="over max_pixels"):
        predictor.questions(items, min_pixels=784, max_pixels=700)


def test_the_second_run_asks_nothing(model_folder, items, tmp_path, monkeypatch):
    cache = tmp_path / "answers.jsonl"
    first = _predictor(model_folder, cache)
    questions = first.questions(items, min_pixels=None, max_pixels=None)
    calls = []
    expected = first.predict(questions, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (len(items), len(items))
    second = _predictor(model_folder, cache)
    monkeypatch.setattr(second, "_answer", lambda questions: pytest.fail("asked again"))
    assert second.predict(questions) == expected


def test_a_killed_run_goes_on_with_the_same_answers(model_folder, items, tmp_path):
    whole = _predictor(model_folder, batch_size=2)
    questions = whole.questions(items, min_pixels=None, max_pixels=None)
    expected = whole.predict(questions)

    cache = tmp_path / "answers.jsonl"
    killed = _predictor(model_folder, cache, batch_size=2)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed.predict(questions, progress=stop)
    resumed = _predictor(model_folder, cache, batch_size=2)
    assert len(resumed.cache.answers) == 2
    assert resumed.predict(questions) == expected


def test_limits_that_resize_alike_share_an_answer(model_folder, items):
    predictor = _predictor(model_folder)
    questions = [
        question
        for high in (90 * 784, 100 * 784)
        for question in predictor.questions(items, min_pixels=784, max_pixels=high)
    ]
    predictor.predict(questions)
    assert len(predictor.cache.answers) == len(items)


def test_a_turned_photograph_is_measured_as_shown(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20)).save(tmp_path / "turned.jpg", exif=exif)
    assert image_size(tmp_path / "turned.jpg") == (30, 20)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(CliError, match=r"no config\.json"):
        Predictor(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CliError, match="AutoProcessor cannot load"):
        Predictor(tmp_path).default_limits  # noqa: B018
