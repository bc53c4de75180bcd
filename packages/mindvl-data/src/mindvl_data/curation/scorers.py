# SPDX-License-Identifier: Apache-2.0
"""Models that score an image, or an image with a text: transformers directories, ONNX files, NudeNet, endpoints.

Used by the steps of model_scores.py. A scorer is any object with `score`. Models run on batches of a fixed size, the last
one filled up, and scores are rounded to four decimals, so that a score does not depend on the other images of a batch.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mindvl_data.curation.endpoint import Endpoint, Question
from mindvl_data.curation.extras import require
from mindvl_data.curation.record import Record
from mindvl_data.errors import DataError, SampleError

DECIMALS = 4
EXPOSED = (
    "BUTTOCKS_EXPOSED",
    "FEMALE_BREAST_EXPOSED",
    "FEMALE_GENITALIA_EXPOSED",
    "MALE_GENITALIA_EXPOSED",
    "ANUS_EXPOSED",
)
_NUMBER = re.compile(r"(-?\d{1,9}(?:\.\d{1,9})?)\.?")
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Item:
    """An image of a record and its text."""

    record: Record
    index: int
    text: str = ""

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """RGB [H, W, 3]."""
        return self.record.image(self.index)


class Scorer(Protocol):
    """Scores images; a score depends on its item only."""

    def score(self, items: Sequence[Item]) -> list[float]:
        """One score per item."""


class ClipSimilarity:
    """Cosine similarity of image and text by a CLIP, Chinese-CLIP or SigLIP model.

    Args:
        directory: Directory of the model in transformers format, with its processor.
        device: Device of torch.
        batch_size: Images that the model processes at a time.

    Raises:
        DataError: The directory is not such a model.
    """

    def __init__(self, directory: Path, device: str, batch_size: int) -> None:
        transformers = _loaded(directory)
        try:
            self._model = transformers.AutoModel.from_pretrained(directory, local_files_only=True).to(device).eval()
            self._images = transformers.AutoImageProcessor.from_pretrained(directory, local_files_only=True)
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{directory}: the model cannot be loaded: {error}. Give a directory of a CLIP model."
            ) from error
        self._length = getattr(self._model.config, "text_config", self._model.config).max_position_embeddings
        self._device, self._batch_size = device, batch_size

    def score(self, items: Sequence[Item]) -> list[float]:
        """Similarities from -1 to 1."""
        return _in_batches(items, self._batch_size, self._similarities)

    def _similarities(self, items: Sequence[Item]) -> NDArray[np.float32]:
        import torch

        inputs = dict(self._images(images=[Image.fromarray(item.pixels) for item in items], return_tensors="pt"))
        texts = [item.text for item in items]
        inputs |= self._tokenizer(
            texts, padding="max_length", truncation=True, max_length=self._length, return_tensors="pt"
        )
        with torch.inference_mode():
            output = self._model(**{name: value.to(self._device) for name, value in inputs.items()})
            similarities: NDArray[np.float32] = (output.image_embeds * output.text_embeds).sum(-1).float().cpu().numpy()
        return similarities


class ImageClassifier:
    """Probability of a class by an image classifier in transformers format; its output if it has one output only.

    Args:
        directory: Directory of the model, with its image processor.
        label: Name of the class in the model's configuration; may be empty if the model has one output.
        device: Device of torch.
        batch_size: Images that the model processes at a time.

    Raises:
        DataError: The directory is not such a model, or it has no such class.
    """

    def __init__(self, directory: Path, label: str, device: str, batch_size: int) -> None:
        transformers = _loaded(directory)
        try:
            model = transformers.AutoModelForImageClassification.from_pretrained(directory, local_files_only=True)
            self._images = transformers.AutoImageProcessor.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{directory}: the model cannot be loaded: {error}. Give a directory of an image classifier."
            ) from error
        self._model = model.to(device).eval()
        names = {str(name): int(index) for index, name in model.config.id2label.items()}
        if len(names) > 1 and label not in names:
            raise DataError(f"label: the model {directory} has no class {label!r}. Use one of {', '.join(names)}.")
        self._column = names.get(label, 0)
        self._several = model.config.problem_type == "multi_label_classification"
        self._device, self._batch_size = device, batch_size

    def score(self, items: Sequence[Item]) -> list[float]:
        """Probabilities, or outputs of a model with one output."""
        return _in_batches(items, self._batch_size, self._probabilities)

    def _probabilities(self, items: Sequence[Item]) -> NDArray[np.float32]:
        import torch

        images = [Image.fromarray(item.pixels) for item in items]
        inputs = self._images(images=images, return_tensors="pt").to(self._device)
        with torch.inference_mode():
            logits = self._model(**inputs).logits.float()
        if self._several:
            logits = logits.sigmoid()
        elif logits.shape[-1] > 1:
            logits = logits.softmax(-1)
        values: NDArray[np.float32] = logits[:, self._column].cpu().numpy()
        return values


class OnnxScorer:
    """Output of an ONNX model for an image.

    The model takes one float32 tensor of images [N, 3, H, W], resized to H x W, scaled to 0 to 1 and normalized, and returns
    a tensor [N] or [N, C].

    Args:
        file: The model.
        column: Which of the C outputs is the score.
        size: H and W in pixels if the model accepts any.
        mean, std: Of the normalization, per channel; those of ImageNet if None.
        batch_size: Images at a time if the model accepts any number.

    Raises:
        DataError: The file is not such a model.
    """

    def __init__(
        self,
        file: Path,
        column: int,
        size: int,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        batch_size: int,
    ) -> None:
        onnxruntime = require("onnxruntime", extra="onnx", where=str(file))
        try:
            self._session = onnxruntime.InferenceSession(str(file), providers=onnxruntime.get_available_providers())
            (entry,) = self._session.get_inputs()
            batch, channels, height, width = entry.shape
        except Exception as error:  # onnxruntime raises errors of many types
            raise DataError(
                f"{file}: the ONNX model cannot be used: {error}. Give a model with one input [N, 3, H, W]."
            ) from error
        if channels != 3:
            raise DataError(f"{file}: the model takes {channels} channels. Give a model with one input [N, 3, H, W].")
        self._name, self._column = entry.name, column
        self._size = tuple(side if isinstance(side, int) else size for side in (height, width))
        self._batch_size = batch if isinstance(batch, int) else batch_size
        self._mean = np.array(mean or _IMAGENET_MEAN, np.float32)
        self._std = np.array(std or _IMAGENET_STD, np.float32)

    def score(self, items: Sequence[Item]) -> list[float]:
        """Outputs of the model."""
        return _in_batches(items, self._batch_size, self._outputs)

    def vectors(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """All outputs [N, C] for images [H, W, 3]."""
        height, width = self._size
        resized = np.stack(
            [
                np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC), np.float32)
                for image in images
            ]
        )
        normalized = (resized / 255 - self._mean) / self._std
        output: NDArray[np.float32] = self._session.run(None, {self._name: normalized.transpose(0, 3, 1, 2)})[0]
        return output.reshape(len(images), -1)

    def _outputs(self, items: Sequence[Item]) -> NDArray[np.float32]:
        return self.vectors([item.pixels for item in items])[:, self._column]


class NudeNet:
    """Highest probability of an exposed body part, by the detector that nudenet includes.

    Args:
        classes: Classes of the detector that count.
    """

    def __init__(self, classes: Sequence[str] = EXPOSED) -> None:
        self._detector = require("nudenet", extra="nsfw", where="nsfw_score").NudeDetector()
        self._classes = frozenset(classes)

    def score(self, items: Sequence[Item]) -> list[float]:
        """Probabilities; 0 if nothing is detected. The detector reports nothing below 0.2."""
        scores = []
        for item in items:
            # It expects BGR, as OpenCV reads.
            found = self._detector.detect(np.ascontiguousarray(item.pixels[..., ::-1]))
            scores.append(max((one["score"] for one in found if one["class"] in self._classes), default=0.0))
        return [round(score, DECIMALS) for score in scores]


class EndpointScorer:
    """A number that a model behind an OpenAI-compatible endpoint answers.

    Args:
        endpoint: The model.
        prompt: Question about the image, which asks for a number and nothing else; {text} is the text of the record.
        lowest, highest: Range of the answers.
    """

    def __init__(self, endpoint: Endpoint, prompt: str, lowest: float, highest: float) -> None:
        self._endpoint, self._prompt = endpoint, prompt
        self._lowest, self._highest = lowest, highest

    def score(self, items: Sequence[Item]) -> list[float]:
        """The answers.

        Raises:
            SampleError: An answer is not a number in the range.
        """
        questions = [
            Question([item.record.media[item.index], self._prompt.replace("{text}", item.text)], max_tokens=16)
            for item in items
        ]
        return [self._number(reply.text) for reply in self._endpoint.ask_all(questions)]

    def _number(self, answer: str) -> float:
        found = _NUMBER.fullmatch(answer.strip())
        if not found or not self._lowest <= float(found[1]) <= self._highest:
            raise SampleError(f"the model answered {answer!r:.60}, not a number from {self._lowest} to {self._highest}")
        return round(float(found[1]), DECIMALS)


def _loaded(directory: Path) -> Any:
    """The library transformers, after a check that the directory has a model; nothing is downloaded."""
    if not (directory / "config.json").is_file():
        raise DataError(f"{directory}: not a model directory: it has no config.json. Give a directory of transformers.")
    import transformers

    return transformers


def _in_batches(items: Sequence[Item], size: int, run: Callable[[Sequence[Item]], NDArray[np.float32]]) -> list[float]:
    """Scores of all items, computed in batches of exactly `size` items; the last batch repeats its last item."""
    scores: list[float] = []
    for start in range(0, len(items), size):
        batch = list(items[start : start + size])
        values = run([*batch, *[batch[-1]] * (size - len(batch))])[: len(batch)].tolist()
        for item, value in zip(batch, values, strict=True):
            if not np.isfinite(value):
                raise SampleError(f"image {item.index}: the model returned the score {value}")
        scores += [round(value, DECIMALS) for value in values]
    return scores
