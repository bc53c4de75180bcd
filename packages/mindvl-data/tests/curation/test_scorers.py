# SPDX-License-Identifier: Apache-2.0
"""Scores of tiny random models, compared with the models themselves."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from mindvl_data.curation.endpoint import Question
from mindvl_data.curation.endpoint_store import Reply
from mindvl_data.curation.record import Record
from mindvl_data.curation.scorers import ClipSimilarity, EndpointScorer, ImageClassifier, Item, NudeNet, OnnxScorer
from mindvl_data.errors import DataError, SampleError

TEXTS = ("a black cat", "a red sofa", "rain", "cat cat cat")
WORDS = ["<start>", "<end>", "a", "black", "cat", "red", "sofa", "rain"]


def items(*sizes: tuple[int, int]) -> list[Item]:
    made = []
    for number, (height, width) in enumerate(sizes):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        made.append(Item(Record(number=number, id="", body={}, media=(buffer.getvalue(),)), 0, TEXTS[number]))
    return made


SIZES = ((30, 40), (64, 64), (50, 20), (33, 35))


def write_clip(directory: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {
        **small,
        "vocab_size": 8,
        "max_position_embeddings": 8,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": 1,
    }
    config = CLIPConfig(text_config=text, vision_config={**small, "image_size": 16, "patch_size": 8}, projection_dim=8)
    CLIPModel(config).save_pretrained(directory)
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 0), ("<end>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<start>", eos_token="<end>", pad_token="<end>"
    ).save_pretrained(directory)


def test_clip_similarities_equal_those_of_transformers_and_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    import torch
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

    write_clip(tmp_path)
    found = items(*SIZES)
    scorer = ClipSimilarity(tmp_path, "cpu", batch_size=3)
    scores = scorer.score(found)
    model = CLIPModel.from_pretrained(tmp_path).eval()
    images = AutoImageProcessor.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for item, score in zip(found, scores, strict=True):
        inputs = images(images=Image.fromarray(item.pixels), return_tensors="pt") | tokenizer(
            item.text, return_tensors="pt"
        )
        with torch.inference_mode():
            output = model(**inputs)
        assert score == pytest.approx(output.logits_per_image.item() / model.logit_scale.exp().item(), abs=1e-4)
    assert len(set(scores)) == len(scores)
    assert [scorer.score([item])[0] for item in found] == scores
    assert scorer.score(found[::-1]) == scores[::-1]


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_the_probability_of_a_class_is_that_of_transformers(tmp_path: Path, problem: str) -> None:
    import torch
    from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    names = {0: "plain", 1: "watermark", 2: "logo"}
    config = ViTConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8,
        id2label=names, label2id={name: index for index, name in names.items()}, problem_type=problem,
    )  # fmt: skip
    model = ViTForImageClassification(config).eval()
    model.classifier.weight.data.mul_(30)
    model.save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    found = items(*SIZES)
    scores = ImageClassifier(tmp_path, "watermark", "cpu", batch_size=3).score(found)
    images = AutoImageProcessor.from_pretrained(tmp_path)
    with torch.inference_mode():
        logits = model(**images(images=[Image.fromarray(item.pixels) for item in found], return_tensors="pt")).logits
    expected = logits.sigmoid()[:, 1] if problem.startswith("multi") else logits.exp()[:, 1] / logits.exp().sum(-1)
    assert scores == pytest.approx(expected.tolist(), abs=1e-4)
    assert len(set(scores)) == len(scores)
    with pytest.raises(DataError, match=r"has no class 'nsfw'\. Use one of plain, watermark, logo"):
        ImageClassifier(tmp_path, "nsfw", "cpu", 3)


def field(number: int, value: int | bytes | str) -> bytes:
    """A field of a protobuf message."""

    def varint(of: int) -> bytes:
        return bytes([of]) if of < 128 else bytes([of & 127 | 128]) + varint(of >> 7)

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def write_onnx(path: Path, batch: int | str) -> None:
    """A model [N, 3, 4, 6] -> [N, 3] that averages each channel: GlobalAveragePool, Flatten."""

    def value(name: str, *shape: int | str) -> bytes:
        sizes = b"".join(field(1, field(1, size) if isinstance(size, int) else field(2, size)) for size in shape)
        return field(1, name) + field(2, field(1, field(1, 1) + field(2, sizes)))

    nodes = [("x", "pooled", "GlobalAveragePool"), ("pooled", "y", "Flatten")]
    graph = b"".join(field(1, field(1, source) + field(2, target) + field(4, kind)) for source, target, kind in nodes)
    graph += field(2, "mean") + field(11, value("x", batch, 3, 4, 6)) + field(12, value("y", batch, 3))
    path.write_bytes(field(1, 8) + field(7, graph) + field(8, field(1, "") + field(2, 13)))


@pytest.mark.parametrize("batch", [2, "N"])
def test_the_output_of_an_onnx_model_is_the_score(tmp_path: Path, batch: int | str) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    write_onnx(tmp_path / "mean.onnx", batch)
    found = items((4, 6), (4, 6), (4, 6))
    scorer = OnnxScorer(tmp_path / "mean.onnx", 1, 224, (0.0, 0.5, 0.0), (1.0, 2.0, 1.0), batch_size=2)
    expected = [(item.pixels[..., 1].mean() / 255 - 0.5) / 2 for item in found]
    assert scorer.score(found) == pytest.approx(expected, abs=1e-4)
    assert scorer.score(found[2:]) == scorer.score(found)[2:]


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    (tmp_path / "a.onnx").write_bytes(b"no model")
    with pytest.raises(DataError, match=r"a\.onnx: the ONNX model cannot be used"):
        OnnxScorer(tmp_path / "a.onnx", 0, 224, None, None, 1)
    with pytest.raises(DataError, match=r"not a model directory: it has no config\.json"):
        ClipSimilarity(tmp_path, "cpu", 1)


def test_nudenet_detects_nothing_in_noise_and_a_score_is_the_highest_of_its_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("nudenet", reason="nudenet is not installed")
    scorer = NudeNet()
    assert scorer.score(items((64, 64), (30, 90))) == [0.0, 0.0]
    detections = [("FACE_FEMALE", 0.9), ("ANUS_EXPOSED", 0.31), ("BUTTOCKS_EXPOSED", 0.62)]
    seen: list[NDArray[np.uint8]] = []

    def detect(pixels: NDArray[np.uint8]) -> list[dict[str, Any]]:
        seen.append(pixels)
        return [{"class": name, "score": score} for name, score in detections]

    monkeypatch.setattr(scorer._detector, "detect", detect)
    (item,) = items((8, 8))
    assert scorer.score([item]) == [0.62]
    assert np.array_equal(seen[0][..., 0], item.pixels[..., 2])  # blue first


class _Endpoint:
    def __init__(self, *answers: str) -> None:
        self.answers, self.questions = answers, []  # type: tuple[str, ...], list[Question]

    def ask_all(self, questions: list[Question]) -> list[Reply]:
        self.questions += questions
        return [Reply(answer, "stop", 1, 1) for answer in self.answers]


def test_an_endpoint_answers_with_a_number_in_the_range() -> None:
    endpoint: Any = _Endpoint("7", " 2.5\n")
    found = items((8, 8), (9, 9))
    assert EndpointScorer(endpoint, "Rate {text}.", 0, 10).score(found) == [7.0, 2.5]
    assert endpoint.questions[1].parts == [found[1].record.media[0], "Rate a red sofa."]
    for answer in ("11", "seven", "7/10", ""):
        with pytest.raises(SampleError, match="not a number from 0 to 10"):
            EndpointScorer(_Endpoint(answer), "", 0, 10).score(items((8, 8)))  # type: ignore[arg-type]
