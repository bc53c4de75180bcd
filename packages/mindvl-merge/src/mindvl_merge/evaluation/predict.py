# SPDX-License-Identifier: Apache-2.0
"""Answer benchmark items with an exported model directory through transformers: batched, greedy, cached.

Comes after benchmark.py, before grounding.py. Items of similar length share a batch, padded on the left. Batches are built
from all requests, including cached ones, so that a resumed evaluation has the same batches and answers.
"""

import copy
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mindvl_merge.adapters import model_directory_problem
from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.benchmark import IMAGE_MARK, Item
from mindvl_merge.evaluation.cache import AnswerCache
from mindvl_merge.evaluation.devices import Answered, DevicePool, check_device
from mindvl_merge.evaluation.grounding import Size
from mindvl_merge.evaluation.images import ImageDecoder, image_hash, image_size, open_image
from mindvl_merge.evaluation.predictions import CoordinateUnit, Prediction, Question

Progress = Callable[[int, int], None]  # requests answered, requests in all

Loader = Callable[..., Any]  # loader(auto_class, directory, trust_remote_code=..., **options) -> model or processor

# Files other than the weights that affect an answer; the limits of the processor are part of a request.
_TEXT_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_DECODER = 2  # version of image decoding; cached answers of other versions are not used


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Settings of generation."""

    # Auto: an accelerator if there is one, else cpu; several, as in cuda:0,cuda:1: a process for each.
    device: str = "auto"
    batch_size: int = 64  # items in one generate call
    max_batch_tokens: int = 32768  # prompt tokens in one generate call, padding included
    max_new_tokens: int = 64  # longest answer

    @property
    def devices(self) -> tuple[str, ...]:
        """The names in `device`."""
        return tuple(name.strip() for name in self.device.split(","))


class Predictor:
    """Generates answers with a model directory; processor and model are loaded on first use.

    Args:
        directory: Model in the transformers layout.
        decoder: Decodes images as training does.
        load: Calls `from_pretrained` of an Auto class on the directory.
        cache: JSONL file of answers, shared by all models and settings; None keeps them in memory.
        trust_remote_code: Run the Python files of the directory; MindVL models need it.
        coordinates: Unit of points and boxes in answers, if the processor does not have it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        decoder: ImageDecoder,
        load: Loader,
        config: PredictConfig | None = None,
        cache: Path | None = None,
        trust_remote_code: bool = False,
        coordinates: CoordinateUnit = "absolute",
    ) -> None:
        problem = model_directory_problem(directory)
        if problem is not None:
            raise EvaluationError(problem)
        self.directory = directory
        self.decoder = decoder
        self.load = load
        self.config = config or PredictConfig()
        self.cache = AnswerCache(cache)
        self.trust_remote_code = trust_remote_code
        self._coordinates = coordinates

    @cached_property
    def processor(self) -> Any:
        """The processor of the directory, or the tokenizer of a model without images, padding on the left."""
        from transformers import AutoProcessor

        processor = self._load(AutoProcessor)
        if processor.chat_template is None:
            raise EvaluationError(
                f"{self.directory}: has no chat template. Copy chat_template.jinja of the model that it was trained from."
            )
        _tokenizer(processor).padding_side = "left"
        return processor

    @cached_property
    def device(self) -> str:
        """Device that runs the model."""
        import torch

        if self.config.device != "auto":
            check_device(self.config.device)
            return self.config.device
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type

    @cached_property
    def model(self) -> Any:
        """The model of the directory, in evaluation mode."""
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.utils import logging as transformers_logging

        device = self.device  # an error about it comes before hours of loading
        transformers_logging.disable_progress_bar()  # it would interrupt ours
        kind = AutoModelForCausalLM if self._image_processor is None else AutoModelForImageTextToText
        model = self._load(kind, dtype="auto", use_safetensors=True)
        if device == "cpu" and model.dtype in (torch.float16, torch.bfloat16):
            model = model.float()  # 16 bit is emulated on most CPUs
        return model.to(device).eval()

    @property
    def _image_processor(self) -> Any:
        """None for a model without images."""
        return getattr(self.processor, "image_processor", None)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the weights and of every file that affects tokenization."""
        from mindvl_merge import directory_digest

        digest = hashlib.sha256(directory_digest(self.directory).encode())
        for name in _TEXT_FILES:
            path = self.directory / name
            digest.update(path.read_bytes() if path.is_file() else b"")
        return digest.hexdigest()

    @property
    def default_limits(self) -> tuple[int, int]:
        """min_pixels and max_pixels of the directory's processor; zeros for a model without images."""
        if self._image_processor is None:
            return 0, 0
        size = self._image_processor.size
        return int(size["shortest_edge"]), int(size["longest_edge"])

    @cached_property
    def multiple(self) -> int:
        """Side of a visual token in pixels."""
        images = self._image_processor
        if images is None:
            raise EvaluationError(
                f"{self.directory}: the model has no image processor. Evaluate it on text benchmarks."
            )
        return int(images.patch_size * images.merge_size)

    def questions(self, items: Sequence[Item], *, min_pixels: int | None, max_pixels: int | None) -> list[Question]:
        """Questions with these limits; None means the limit of the processor."""
        low, high = self.default_limits
        low, high = low if min_pixels is None else min_pixels, high if max_pixels is None else max_pixels
        if low > high:
            raise EvaluationError(f"--min-pixels: {low} is above --max-pixels {high}. Lower it or raise --max-pixels.")
        return [Question(item=item, min_pixels=low, max_pixels=high) for item in items]

    def sizes(self, item: Item, min_pixels: int, max_pixels: int) -> tuple[Size, ...]:
        """Size of each image of an item after resizing."""
        limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        try:
            sizes = [image_size(path, self.decoder) for path in item.images]
        except EvaluationError as error:
            raise EvaluationError(f"item {item.id}: {error}") from error
        try:
            return tuple(self.decoder.resized(size, multiple=self.multiple, **limits) for size in sizes)
        except EvaluationError as error:
            raise EvaluationError(
                f"item {item.id}: {', '.join(map(str, item.images))}: {error} Remove the item."
            ) from error

    def predict(self, questions: Sequence[Question], *, progress: Progress | None = None) -> list[Prediction]:
        """Answer every question, from the cache if possible; the order is kept."""
        keys = [self._key(question) for question in questions]
        distinct = {key: question for key, question in zip(keys, questions, strict=True)}
        self._answer_all(distinct, progress)
        return [
            Prediction(
                item=question.item,
                answer=self.cache.answers[key],
                original=tuple(image_size(path, self.decoder) for path in question.item.images),
                resized=self.sizes(question.item, question.min_pixels, question.max_pixels),
                # the processor has it, which cached answers to questions without images do not need
                coordinates=self.coordinates if question.item.images else "absolute",
                seconds=self.cache.seconds.get(key),
            )
            for key, question in zip(keys, questions, strict=True)
        ]

    def _answer_all(self, distinct: dict[str, Question], progress: Progress | None) -> None:
        """Answer the questions that are not in the cache."""
        missing = [batch for batch in self._batches(distinct) if any(key not in self.cache.answers for key in batch)]
        done = len(distinct) - sum(map(len, missing))
        for number, answers, seconds in self.answer([[distinct[key] for key in batch] for batch in missing]):
            batch = missing[number]
            self.cache.add(dict(zip(batch, answers, strict=True)), dict.fromkeys(batch, seconds / len(batch)))
            done += len(batch)
            if progress is not None:
                progress(done, len(distinct))

    def answer(self, batches: Sequence[Sequence[Question]]) -> Iterator[Answered]:
        """Answers of each batch, as soon as they are complete; the next batch is prepared during generation."""
        if not batches:
            return
        for device in self.config.devices:
            check_device(device)
        if self._pool is not None:
            yield from self._pool.answer(batches)
            return
        self.load_all()
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(self.prepare, batches[0])
            for number in range(len(batches)):
                inputs = waiting.result()
                if number + 1 < len(batches):
                    waiting = thread.submit(self.prepare, batches[number + 1])
                yield (number, *self.generate(inputs))

    def load_all(self) -> None:
        """Load what answers need, so that it is not loaded in two threads or measured."""
        _ = self.processor, self.model, self.tokenizer

    @cached_property
    def _pool(self) -> DevicePool | None:
        devices = self.config.devices
        if len(devices) < 2:
            return None
        make = partial(_loaded_predictor, self.directory, self.decoder, self.load, self.config, self.trust_remote_code)
        return DevicePool(make, devices)

    def _load(self, auto_class: Any, **options: Any) -> Any:
        return self.load(auto_class, self.directory, trust_remote_code=self.trust_remote_code, **options)

    def _key(self, question: Question) -> str:
        item = question.item
        images = [image_hash(image) for image in item.images]
        sizes = self.sizes(item, question.min_pixels, question.max_pixels)
        decoding = [_DECODER, "jpeg_scaling"] if item.images and self.jpeg_scaling else _DECODER
        parts = [decoding, self.fingerprint, item.id, item.question, images, sizes, self.config.max_new_tokens]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _batches(self, questions: dict[str, Question]) -> list[list[str]]:
        """Keys in batches of one kind (images or none, one pair of limits), longest first, so that out-of-memory occurs early."""

        def group(key: str) -> tuple[bool, int, int]:
            question = questions[key]
            has_images = bool(question.item.images)
            return has_images, question.min_pixels * has_images, question.max_pixels * has_images

        lengths = {key: self._length(question) for key, question in questions.items()}
        batches: list[list[str]] = []
        for key in sorted(questions, key=lambda key: (group(key), -lengths[key], key)):
            last = batches[-1] if batches else []
            fits = len(last) < self.config.batch_size and bool(last) and group(last[0]) == group(key)
            if fits and (len(last) + 1) * lengths[last[0]] <= self.config.max_batch_tokens:
                last.append(key)
            else:
                batches.append([key])
        return batches

    def _length(self, question: Question) -> int:
        """Approximate number of prompt tokens, for sorting."""
        sizes = self.sizes(question.item, question.min_pixels, question.max_pixels)
        area = self.multiple**2 if sizes else 1
        return sum(height * width // area for height, width in sizes) + len(question.item.question)

    def prepare(self, batch: Sequence[Question]) -> Any:
        """Inputs of the model on the host: token ids, and patches of the images."""
        return self.encode([self._prompt(question.item) for question in batch], batch)

    def encode(self, texts: Sequence[str], batch: Sequence[Question]) -> Any:
        """Inputs of the model on the host, from prompts with one placeholder for each image of their questions."""
        images = [image for question in batch for image in self._images(question)]
        options: dict[str, Any] = {}
        if images:
            limits = {"shortest_edge": batch[0].min_pixels, "longest_edge": batch[0].max_pixels}
            options = {"images": images, "images_kwargs": {"size": limits}}
        inputs = self.processor(text=texts, return_tensors="pt", padding=True, **options)
        if images:
            self._check_sizes(batch, inputs["image_grid_thw"])
        return inputs

    def generate(self, inputs: Any) -> tuple[list[str], float]:
        """Answers by greedy decoding with a key-value cache, and the seconds that they took."""
        import torch
        from transformers import GenerationConfig

        start = time.perf_counter()
        inputs = inputs.to(self.device)
        tokenizer = self.tokenizer
        greedy = GenerationConfig(
            max_new_tokens=self.config.max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        with torch.inference_mode():
            output = self.model.generate(**inputs, generation_config=greedy)
        answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [answer.strip() for answer in answers], time.perf_counter() - start

    @cached_property
    def tokenizer(self) -> Any:
        """A second tokenizer, for decoding: one object must not encode and decode in two threads at the same time."""
        return copy.deepcopy(_tokenizer(self.processor))

    @property
    def jpeg_scaling(self) -> bool:
        """Whether the model was trained on JPEGs that were decoded at a fraction of their size."""
        return bool(getattr(self._image_processor, "jpeg_scaling", False))

    @property
    def coordinates(self) -> CoordinateUnit:
        """Unit of points and boxes in answers."""
        stored: CoordinateUnit | None = getattr(self._image_processor, "coordinates", None)
        return stored or self._coordinates

    def _images(self, question: Question) -> list[Any]:
        paths = question.item.images
        if not self.jpeg_scaling:
            return [open_image(path, self.decoder) for path in paths]
        sizes = self.sizes(question.item, question.min_pixels, question.max_pixels)
        return [open_image(path, self.decoder, size) for path, size in zip(paths, sizes, strict=True)]

    def _check_sizes(self, questions: Sequence[Question], grids: Any) -> None:
        """Refuse a processor that resizes differently: coordinates and cache depend on the sizes computed here."""
        patch = self.processor.image_processor.patch_size
        expected = [
            size
            for question in questions
            for size in self.sizes(question.item, question.min_pixels, question.max_pixels)
        ]
        actual = [(height * patch, width * patch) for _, height, width in grids.tolist()]
        if actual != expected:
            raise EvaluationError(
                f"{self.directory}: the processor resizes to {actual[:3]}, expected {expected[:3]} (height, width). Use a model "
                "with a processor that resizes as the Qwen2-VL processor does."
            )

    def _prompt(self, item: Item) -> str:
        message = {"role": "user", "content": self.content(item.question)}
        prompt: str = self.processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return prompt

    def content(self, text: str) -> str | list[dict[str, str]]:
        """Content of a message for the chat template; each IMAGE_MARK becomes an image."""
        if self._image_processor is None:
            return text
        parts: list[dict[str, str]] = []
        for number, piece in enumerate(text.split(IMAGE_MARK)):
            if number:
                parts.append({"type": "image"})
            if piece:
                parts.append({"type": "text", "text": piece})
        return parts


def _tokenizer(processor: Any) -> Any:
    return getattr(processor, "tokenizer", processor)


def _loaded_predictor(
    directory: Path,
    decoder: ImageDecoder,
    load: Loader,
    config: PredictConfig,
    trust_remote_code: bool,
    device: str,
    num_processes: int,
) -> Predictor:
    """The predictor of one device in a process of its own; cores are shared by the processes on CPU."""
    import torch

    if device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // num_processes))
    own = replace(config, device=device)
    predictor = Predictor(directory, decoder=decoder, load=load, config=own, trust_remote_code=trust_remote_code)
    predictor.load_all()
    return predictor
