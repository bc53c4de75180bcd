# SPDX-License-Identifier: Apache-2.0
"""Answer benchmark items by an OpenAI-compatible endpoint: images are sent at the size that the limits give them.

Comes beside predict.py, whose cache and sizes it shares; endpoint.py sends the requests. Every answer is in the cache as soon as
it arrives, so that none is asked for twice.
"""

import base64
import hashlib
import io
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.benchmark import IMAGE_MARK
from mindvl_merge.evaluation.cache import AnswerCache
from mindvl_merge.evaluation.endpoint import Endpoint, EndpointConfig
from mindvl_merge.evaluation.grounding import Size
from mindvl_merge.evaluation.images import ImageDecoder, open_image
from mindvl_merge.evaluation.predict import PredictConfig, Predictor, Progress
from mindvl_merge.evaluation.predictions import CoordinateUnit, Question
from mindvl_merge.evaluation.resolution import PAPER_UNIT_SIDE

_DEFAULT_MAX_UNITS = 16384  # default limits of Qwen2.5-VL's published processor, in visual tokens
_DEFAULT_MIN_UNITS = 4
_JUDGE_TOKENS = 2048  # longest reply of a judge


class RemotePredictor(Predictor):
    """Generates answers at an endpoint.

    Args:
        endpoint: Where the model is.
        decoder: Decodes images as training does.
        cache: JSONL file of answers; None keeps them in memory.
        multiple: Side of a visual token in pixels; images are resized to multiples of it, so that the server keeps their size.
        limits: Default minimum and maximum of the image area in pixels; None: those of Qwen2.5-VL's published processor, in
            visual tokens.
        coordinates: Unit of points and boxes in answers.
    """

    def __init__(
        self,
        endpoint: EndpointConfig,
        *,
        decoder: ImageDecoder,
        config: PredictConfig | None = None,
        cache: Path | None = None,
        multiple: int = PAPER_UNIT_SIDE,
        limits: tuple[int, int] | None = None,
        coordinates: CoordinateUnit = "absolute",
    ) -> None:
        self.endpoint = Endpoint(endpoint)
        self.directory = Path(endpoint.model)
        self.decoder = decoder
        self.config = config or PredictConfig()
        self.cache = AnswerCache(cache)
        self.__dict__["multiple"] = multiple  # in place of the processor's
        self._coordinates = coordinates
        self._limits = limits or (_DEFAULT_MIN_UNITS * multiple**2, _DEFAULT_MAX_UNITS * multiple**2)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of endpoint and model name; the weights behind them are not known."""
        return hashlib.sha256(f"{self.endpoint.config.url} {self.endpoint.config.model}".encode()).hexdigest()

    @property
    def jpeg_scaling(self) -> bool:
        """Images are decoded whole, as a server does."""
        return False

    @property
    def coordinates(self) -> CoordinateUnit:
        """Unit of points and boxes in answers."""
        return self._coordinates

    @property
    def default_limits(self) -> tuple[int, int]:
        """Default minimum and maximum of the image area in pixels."""
        return self._limits

    def _answer_all(self, distinct: dict[str, Question], progress: Progress | None) -> None:
        missing = {key: question for key, question in distinct.items() if key not in self.cache.answers}
        done = len(distinct) - len(missing)
        with ThreadPoolExecutor(self.endpoint.config.num_workers) as pool:
            futures = {key: pool.submit(self._ask, question) for key, question in missing.items()}
            try:
                for number, (key, future) in enumerate(futures.items()):
                    self._keep({key: future.result()})
                    if progress is not None:
                        progress(done + number + 1, len(distinct))
            except BaseException:
                for future in futures.values():
                    future.cancel()
                pool.shutdown()  # requests under way end; their answers are kept
                finished = {
                    k: f.result() for k, f in futures.items() if f.done() and not f.cancelled() and not f.exception()
                }
                self._keep({key: found for key, found in finished.items() if key not in self.cache.answers})
                raise

    def _keep(self, found: dict[str, tuple[str, float]]) -> None:
        answers = {key: answer for key, (answer, _) in found.items()}
        self.cache.add(answers, {key: seconds for key, (_, seconds) in found.items()})

    def _ask(self, question: Question) -> tuple[str, float]:
        """The answer, and the seconds of the request with its repetitions."""
        try:
            messages = self._messages(question)
            start = time.perf_counter()
            answer = self.endpoint.ask(messages, max_new_tokens=self.config.max_new_tokens).strip()
        except EvaluationError as error:
            raise EvaluationError(f"item {question.item.id}: {error}") from error
        return answer, time.perf_counter() - start

    def _messages(self, question: Question) -> list[dict[str, Any]]:
        sizes = iter(self.sizes(question.item, question.min_pixels, question.max_pixels))
        images = iter(question.item.images)
        content: list[dict[str, Any]] = []
        for number, text in enumerate(question.item.question.split(IMAGE_MARK)):
            if number:
                content.append({"type": "image_url", "image_url": {"url": self._image_url(next(images), next(sizes))}})
            if text:
                content.append({"type": "text", "text": text})
        return [{"role": "user", "content": content}]

    def _image_url(self, image: Any, size: Size) -> str:
        """A PNG of exactly this size, as a data URL."""
        from PIL import Image

        height, width = size
        file = io.BytesIO()
        open_image(image, self.decoder).resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def endpoint_judge(config: EndpointConfig, *, cache: Path | None = None) -> Any:
    """A judge at an endpoint, as the metrics call it: a function from prompt to reply, safe in several threads.

    The n-th time that one prompt is asked has its own entry in the cache, so that an unreadable reply can be asked for again,
    and a repeated evaluation asks for nothing twice.
    """
    endpoint, answers = Endpoint(config), AnswerCache(cache)
    counts: dict[str, int] = {}
    lock = threading.Lock()

    def judge(prompt: str) -> str:
        with lock:
            counts[prompt] = counts.get(prompt, 0) + 1
            parts: Sequence[object] = (config.url, config.model, prompt, counts[prompt], _JUDGE_TOKENS)
        key = hashlib.sha256(repr(parts).encode()).hexdigest()
        if key not in answers.answers:
            reply = endpoint.ask([{"role": "user", "content": prompt}], max_new_tokens=_JUDGE_TOKENS)
            with lock:
                answers.add({key: reply})
        return answers.answers[key]

    return judge
