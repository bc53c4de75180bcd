# SPDX-License-Identifier: Apache-2.0
"""Built-in features by hand, and a tiny CLIP model against transformers."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

from mindvl_data.curation.clusters import embeddings
from mindvl_data.curation.clusters.embeddings import check_model, embed, histograms, thumbnail
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context
from mindvl_data.errors import DataError

NOISE = np.random.default_rng(0).integers(0, 255, (40, 30, 3), np.uint8)


def _record(*images: np.ndarray) -> Record:
    media = []
    for pixels in images:
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        media.append(buffer.getvalue())
    return Record(number=0, id="a", body={}, media=tuple(media))


def test_a_thumbnail_is_the_box_mean_minus_the_mean_of_the_image() -> None:
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:16] = 200
    # Half of the 256 values are 100, the others -100, and the length is 100 * 16.
    expected = np.repeat([1 / 16, -1 / 16], 128)
    assert np.allclose(thumbnail(pixels), expected, atol=1e-6)
    assert not thumbnail(np.full((20, 20, 3), 9, np.uint8)).any()


def test_histograms_count_colors_and_directions() -> None:
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[..., 0] = 255  # hue 0, full saturation and value: bin (0, 2, 2) of 12 x 3 x 3
    found = histograms(pixels)
    assert found.shape == (108 + 128,)
    assert np.flatnonzero(found).tolist() == [8]
    pixels[:, 32:] = 0  # an edge from left to right between cells 1 and 2 of every row of cells
    cells = np.flatnonzero(histograms(pixels)[108:].reshape(16, 8).sum(axis=1))
    assert cells.tolist() == [1, 2, 5, 6, 9, 10, 13, 14]
    assert not histograms(pixels)[108:].reshape(16, 8)[:, 1:].any()  # direction 0 only


def test_a_record_has_the_mean_of_its_images_at_length_one(context: Context) -> None:
    found = embed(_record(NOISE, NOISE[::-1]), "thumbnail", context)
    mean = (thumbnail(NOISE) + thumbnail(NOISE[::-1])) / 2
    assert found is not None
    assert np.allclose(found, mean / np.linalg.norm(mean), atol=1e-6)
    assert embed(_record(), "thumbnail", context) is None


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 32, "patch_size": 8}  # fmt: skip
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=12))
    model.save_pretrained(tmp_path / "clip")
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(
        tmp_path / "clip"
    )
    return tmp_path / "clip"


def test_a_model_gives_the_projected_image_features_of_transformers(clip: Path, context: Context) -> None:
    found = embed(_record(NOISE), str(clip), context)
    model: Any = CLIPModel.from_pretrained(clip)
    inputs = CLIPImageProcessor.from_pretrained(clip)(images=Image.fromarray(NOISE), return_tensors="pt")
    with torch.inference_mode():
        expected = model.visual_projection(model.vision_model(**inputs).pooler_output)[0].numpy()
    assert found is not None
    assert np.allclose(found, expected / np.linalg.norm(expected), atol=1e-5)


class _FakeOnnx:
    """In place of OnnxScorer, whose own test runs a real model: the channel means of each image."""

    def __init__(self, file: Path, *_: Any) -> None:
        assert file.suffix == ".onnx"

    def vectors(self, images: list[np.ndarray]) -> np.ndarray:
        return np.stack([image.mean(axis=(0, 1)) for image in images])


def test_the_outputs_of_an_onnx_file_are_scaled_to_length_one(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "OnnxScorer", _FakeOnnx)
    (tmp_path / "model.onnx").write_bytes(b"")
    check_model(str(tmp_path / "model.onnx"))
    means = NOISE.mean(axis=(0, 1))
    found = embed(_record(NOISE), str(tmp_path / "model.onnx"), context)
    assert found is not None
    assert np.allclose(found, means / np.linalg.norm(means), atol=1e-6)


def test_an_unknown_model_and_a_damaged_one_are_refused(clip: Path, context: Context) -> None:
    with pytest.raises(ValueError, match=r"model: must be thumbnail or histograms, a directory .* got 'clip-l'"):
        check_model("clip-l")
    check_model(str(clip))
    (clip / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"clip: the model cannot be loaded"):
        embed(_record(NOISE), str(clip), context)
