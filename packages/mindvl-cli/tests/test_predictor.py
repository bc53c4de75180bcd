# SPDX-License-Identifier: Apache-2.0
"""Answers of a tiny model: batches, cache, sizes."""

import base64
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from mindvl_cli.predictor import DECODER, make_predictor
from mindvl_data import ImageConfig
from mindvl_data.decoding import opened
from mindvl_data.images import decode, smart_resize, to_patches
from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation import PredictConfig, evaluate, load_benchmarks
from mindvl_merge.evaluation.images import open_image
from mindvl_model import ModelError

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


@pytest.fixture
def items(benchmark_file):
    return load_benchmarks(benchmark_file)[0].items


def _predictor(model_directory, cache=None, **values):
    return make_predictor(
        model_directory,
        config=PredictConfig(**{"max_new_tokens": 4, "device": "cpu", **values}),
        cache=cache,
        trust_remote_code=True,
    )


@pytest.mark.slow
def test_batches_give_the_answers_of_single_items(model_directory, items):
    together, alone = _predictor(model_directory), _predictor(model_directory, batch_size=1)
    questions = together.questions(items, min_pixels=None, max_pixels=None)
    assert [p.answer for p in together.predict(questions)] == [p.answer for p in alone.predict(questions)]


@pytest.mark.slow
def test_two_processes_give_the_answers_of_one(model_directory, items, tmp_path):
    single, double = (
        _predictor(model_directory, tmp_path / name, device=device, batch_size=2)
        for name, device in (("one", "cpu"), ("two", "cpu,cpu"))
    )
    questions = single.questions(items, min_pixels=None, max_pixels=None)
    expected, found = single.predict(questions), double.predict(questions)
    assert found == expected
    assert len({prediction.answer for prediction in expected}) > 1
    assert all(prediction.seconds > 0 for prediction in (*expected, *found))
    assert _predictor(model_directory, tmp_path / "two").predict(questions) == expected  # from the cache


def test_sizes_are_those_of_the_processor_and_follow_the_limits(model_directory, items):
    predictor = _predictor(model_directory)
    assert predictor.default_limits == (4 * 784, 16 * 784)
    assert predictor.sizes(items[2], 784, 100 * 784) == ((84, 196),)  # 90x200 to multiples of 28
    questions = predictor.questions(items, min_pixels=784, max_pixels=9 * 784)
    predictions = predictor.predict(questions)
    assert all(h * w <= 9 * 784 for p in predictions for h, w in p.resized)
    assert predictions[2].original == ((90, 200),)
    with pytest.raises(EvaluationError, match="above --max-pixels"):
        predictor.questions(items, min_pixels=784, max_pixels=700)


def test_the_second_run_asks_nothing(model_directory, items, tmp_path, monkeypatch):
    cache = tmp_path / "answers.jsonl"
    first = _predictor(model_directory, cache)
    questions = first.questions(items, min_pixels=None, max_pixels=None)
    calls = []
    expected = first.predict(questions, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (len(items), len(items))
    second = _predictor(model_directory, cache)
    monkeypatch.setattr(second, "generate", lambda inputs: pytest.fail("asked again"))
    assert second.predict(questions) == expected


@pytest.mark.slow
def test_a_killed_run_continues_with_the_same_answers(model_directory, items, tmp_path):
    whole = _predictor(model_directory, batch_size=2)
    questions = whole.questions(items, min_pixels=None, max_pixels=None)
    expected = whole.predict(questions)

    cache = tmp_path / "answers.jsonl"
    killed = _predictor(model_directory, cache, batch_size=2)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed.predict(questions, progress=stop)
    resumed = _predictor(model_directory, cache, batch_size=2)
    assert len(resumed.cache.answers) == 2
    assert resumed.predict(questions) == expected


def test_limits_that_resize_alike_share_an_answer(model_directory, items):
    predictor = _predictor(model_directory)
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
    assert DECODER.read_size((tmp_path / "turned.jpg").read_bytes()) == (30, 20)


def _unusual_images():
    """Images that decoders disagree about, by file name."""
    noise = np.random.default_rng(0)
    rgba = Image.fromarray(noise.integers(0, 256, (30, 40, 4), dtype=np.uint8))
    palette = Image.fromarray(noise.integers(0, 4, (30, 40), dtype=np.uint8), "P")
    palette.putpalette([10, 20, 30, 200, 100, 0, 0, 250, 9, 90, 90, 90])
    gray = Image.fromarray(noise.integers(0, 1 << 16, (30, 40)).astype(np.uint16))
    rgb = rgba.convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "rgba.png": (rgba, {}),
        "rgba.webp": (rgba, {"lossless": True}),
        "la.png": (rgba.convert("LA"), {}),
        "palette.png": (palette, {}),
        "palette-trns.png": (palette, {"transparency": 2}),
        "rgb-trns.png": (rgb, {"transparency": rgb.getpixel((0, 0))}),
        "gray16.png": (gray, {}),
        "gray16.tiff": (gray, {}),
        "cmyk.jpg": (rgb.convert("CMYK"), {}),
        "turned.jpg": (rgb, {"exif": exif}),
        "turned.png": (rgb, {"exif": exif}),
        "first.gif": (palette, {"transparency": 1}),
        "plain.bmp": (rgb, {}),
        "plain.avif": (rgba, {}),
    }


@pytest.mark.parametrize("name", _unusual_images())
def test_evaluation_shows_a_model_the_pixels_that_training_shows_it(name, tmp_path):
    image, options = _unusual_images()[name]
    path = tmp_path / name
    image.save(path, **options)
    trained = decode(path.read_bytes(), decode_limit=10**6)
    assert DECODER.read_size(path.read_bytes()) == trained.shape[:2]
    np.testing.assert_array_equal(np.asarray(open_image(path, DECODER)), trained)


def test_a_model_trained_with_scaled_decoding_is_shown_the_same_pixels(tmp_path):
    path, image = tmp_path / "large.jpg", ImageConfig(max_pixels=112 * 112, jpeg_scaling=True)
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((800, 600), Image.Resampling.BICUBIC).save(path)
    size = smart_resize(600, 800, multiple=28, min_pixels=image.min_pixels, max_pixels=image.max_pixels)
    with opened(path.read_bytes(), decode_limit=10**6, at_least=size) as decoded:
        assert (decoded.height, decoded.width) == (150, 200)  # a quarter; an eighth has fewer rows than 84
        trained, _ = to_patches(decoded, image)
    shown = np.asarray(open_image(path, DECODER, size))
    assert shown.shape[:2] == size
    np.testing.assert_array_equal(to_patches(shown, image)[0], trained)
    whole = to_patches(np.asarray(open_image(path, DECODER)), image)[0]
    difference = np.abs(whole.astype(int) - trained).mean()
    assert 0 < difference < 4


def test_the_processor_of_a_model_says_whether_training_scaled_jpegs(model_directory, tmp_path):
    directory = shutil.copytree(model_directory, tmp_path / "model")
    assert not _predictor(directory).jpeg_scaling
    (file,) = (f for f in map(directory.joinpath, _PROCESSOR_FILES) if f.is_file())
    document = json.loads(file.read_text())
    document.get("image_processor", document)["jpeg_scaling"] = True
    file.write_text(json.dumps(document))
    assert _predictor(directory).jpeg_scaling


def test_the_unit_of_coordinates_is_that_of_the_encoder_or_of_the_processor(
    model_directory, qwen3_vl_directory, tmp_path
):
    assert _predictor(model_directory).coordinates == "absolute"
    assert _predictor(qwen3_vl_directory).coordinates == "relative"
    directory = shutil.copytree(model_directory, tmp_path / "model")
    (file,) = (f for f in map(directory.joinpath, _PROCESSOR_FILES) if f.is_file())
    document = json.loads(file.read_text())
    document.get("image_processor", document)["coordinates"] = "relative"
    file.write_text(json.dumps(document))
    assert _predictor(directory).coordinates == "relative"


def test_a_damaged_image_is_named(tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(EvaluationError, match=r"a\.png: image cannot be opened.*Replace the file"):
        open_image(tmp_path / "a.png", DECODER)
    with pytest.raises(EvaluationError, match=r"b\.png: the image cannot be read"):
        open_image(tmp_path / "b.png", DECODER)


def test_the_code_of_a_model_directory_does_not_run_unless_asked_for(model_directory, items):
    predictor = make_predictor(model_directory, config=PredictConfig(device="cpu"), cache=None)
    with pytest.raises(
        ModelError, match=r"the remote code of the directory \(processing_tiny\.py\).*--trust-remote-code"
    ):
        predictor.questions(items, min_pixels=None, max_pixels=None)


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(EvaluationError, match=r"no config\.json"):
        make_predictor(tmp_path, config=PredictConfig(), cache=None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="AutoProcessor cannot load"):
        make_predictor(tmp_path, config=PredictConfig(), cache=None).default_limits  # noqa: B018


def test_a_table_with_embedded_images_is_answered_as_image_files_are(model_directory, tmp_path):
    rows = ["index\timage\tquestion\tA\tB\tanswer"]
    for number, color in enumerate(("red", "blue")):
        path = tmp_path / f"{number}.png"
        Image.new("RGB", (90, 60), color).save(path)
        image = base64.b64encode(path.read_bytes()).decode()
        rows.append(f"{number}\t{image}\twhich number?\t1\t2\tB")
    table = tmp_path / "MMBench_DEV.tsv"
    table.write_text("\n".join(rows) + "\n")
    (benchmark,) = load_benchmarks(table)
    files = [replace(item, images=(tmp_path / f"{item.id}.png",)) for item in benchmark.items]
    predictor = _predictor(model_directory)
    answers = []
    for items in (benchmark.items, files):
        predictions = predictor.predict(predictor.questions(items, min_pixels=None, max_pixels=None))
        answers.append([(p.answer, p.original, p.resized) for p in predictions])
    assert answers[0] == answers[1]
    assert len(predictor.cache.answers) == 2  # the same content has the same key
    result = evaluate(predictor, [benchmark])
    assert set(result.metrics["MMBench_DEV"]) == {"overall", "single"}


def test_a_model_without_images_answers_text_and_refuses_images(model_directory, items, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    predictor = _predictor(tmp_path)
    text = [item for item in items if not item.images]
    assert len(predictor.predict(predictor.questions(text, min_pixels=None, max_pixels=None))) == len(text) > 0
    with pytest.raises(EvaluationError, match="the model has no image processor"):
        predictor.predict(predictor.questions(items, min_pixels=None, max_pixels=None))


def test_a_directory_without_a_chat_template_is_named(model_directory, items, tmp_path):
    copied = shutil.copytree(model_directory, tmp_path / "copy")
    (copied / "chat_template.jinja").unlink()
    predictor = _predictor(copied)
    with pytest.raises(EvaluationError, match=r"copy: has no chat template\. Copy chat_template\.jinja"):
        predictor.predict(predictor.questions(items, min_pixels=None, max_pixels=None))
