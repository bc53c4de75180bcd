# SPDX-License-Identifier: Apache-2.0
"""Embeddings of images: of a vision model (transformers directory or ONNX file), or simple features that need no model.

Comes before duplicates/embedding.py and cluster.py. Every embedding has length 1; a record with several images has the mean of
their embeddings. A model runs on one image at a time, so that batches do not change the result.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mindvl_data.curation.record import Record
from mindvl_data.curation.scorers import OnnxScorer
from mindvl_data.curation.step import Context
from mindvl_data.errors import DataError

Embedding = NDArray[np.float32]

_SIDE = 16  # pixels of a thumbnail
_ONNX_SIDE = 224  # pixels of an image for an ONNX model that takes any size
_CELLS, _DIRECTIONS, _GRADIENT_SIDE = 4, 8, 64
_HSV_BINS = (12, 3, 3)


def thumbnail(pixels: NDArray[np.uint8]) -> Embedding:
    """The image at 16 x 16 gray pixels minus their mean [256]: the same composition gives the same vector."""
    small = Image.fromarray(pixels).convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX)
    values = np.asarray(small, np.float32).ravel()
    return _unit(values - values.mean())


def histograms(pixels: NDArray[np.uint8]) -> Embedding:
    """A histogram of colors (hue, saturation, value) and of gradient directions in 4 x 4 cells, each of length 1 [236].

    Similar colors and textures give similar vectors; it does not know what is shown. The gradients follow Dalal and
    Triggs (2005), with one block for the image.
    """
    image = Image.fromarray(pixels).resize((_GRADIENT_SIDE, _GRADIENT_SIDE), Image.Resampling.BOX)
    hsv = np.asarray(image.convert("HSV"), np.int64).reshape(-1, 3) * np.array(_HSV_BINS) // 256
    colors = np.bincount(np.ravel_multi_index(tuple(hsv.T), _HSV_BINS), minlength=int(np.prod(_HSV_BINS)))
    gray = np.asarray(image.convert("L"), np.float32)
    down, right = np.gradient(gray)
    directions = ((np.arctan2(down, right) / np.pi) % 1 * _DIRECTIONS).astype(np.int64) % _DIRECTIONS
    cells = np.arange(_GRADIENT_SIDE) * _CELLS // _GRADIENT_SIDE
    places = (cells[:, None] * _CELLS + cells) * _DIRECTIONS + directions
    gradients = np.bincount(places.ravel(), np.hypot(down, right).ravel(), minlength=_CELLS**2 * _DIRECTIONS)
    parts = [_unit(np.sqrt(colors.astype(np.float32))), _unit(np.sqrt(gradients.astype(np.float32)))]
    return _unit(np.concatenate(parts))


BUILT_IN: dict[str, Callable[[NDArray[np.uint8]], Embedding]] = {"thumbnail": thumbnail, "histograms": histograms}


def check_model(model: str) -> None:
    """Raise ValueError unless the model is built in, a directory of transformers, or an ONNX file."""
    if model not in BUILT_IN and not (Path(model) / "config.json").is_file() and not _is_onnx(model):
        raise ValueError(
            f"model: must be {' or '.join(BUILT_IN)}, a directory of transformers with config.json, or an ONNX file, "
            f"got {model!r}."
        )


def embed(record: Record, model: str, context: Context) -> Embedding | None:
    """The embedding of the images of a record [D]; None if it has no image."""
    function = BUILT_IN.get(model) or context.resource(("embedding", model), lambda: _load(model))
    found = [function(record.image(index)) for index in range(len(record.media))]
    return _unit(np.mean(found, axis=0)) if found else None


def _load(directory: str) -> Callable[[NDArray[np.uint8]], Embedding]:
    """A function that runs a vision model, or the vision half of a model such as CLIP or SigLIP.

    An ONNX model takes images as scorers.py describes, with the normalization of ImageNet; its output is the embedding.
    """
    if _is_onnx(directory):
        scorer = OnnxScorer(Path(directory), 0, _ONNX_SIDE, None, None, 1)
        return lambda pixels: _unit(scorer.vectors([pixels])[0])
    import torch
    from transformers import AutoImageProcessor, AutoModel

    try:
        processor = AutoImageProcessor.from_pretrained(directory, local_files_only=True)
        model: Any = AutoModel.from_pretrained(directory, local_files_only=True).eval()
    except (OSError, ValueError) as error:
        raise DataError(f"steps: {directory}: the model cannot be loaded: {error}. Correct the directory.") from error

    @torch.inference_mode()
    def run(pixels: NDArray[np.uint8]) -> Embedding:
        inputs = processor(images=Image.fromarray(pixels), return_tensors="pt")
        found = model.get_image_features(**inputs) if hasattr(model, "get_image_features") else model(**inputs)
        if not isinstance(found, torch.Tensor):
            pooled = getattr(found, "pooler_output", None)
            found = found.last_hidden_state.mean(dim=1) if pooled is None else pooled
        return _unit(found[0].float().numpy())

    return run


def _is_onnx(model: str) -> bool:
    return model.endswith(".onnx") and Path(model).is_file()


def _unit(values: NDArray[Any]) -> Embedding:
    """The vector scaled to length 1; a vector of zeros (an image of one color) stays as it is."""
    return (values / max(float(np.linalg.norm(values)), 1e-12)).astype(np.float32)
