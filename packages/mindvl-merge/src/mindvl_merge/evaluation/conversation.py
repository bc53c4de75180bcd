# SPDX-License-Identifier: Apache-2.0
"""Talk to a model directory: several turns of text and images, answers as pieces of text while they are generated.

Comes after predict.py, whose Predictor loads the model and prepares the images; `mindvl chat` comes after it.
"""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.benchmark import IMAGE_MARK, Item
from mindvl_merge.evaluation.predict import Predictor


class Conversation:
    """The turns so far, and the images in them.

    Args:
        predictor: Loads the model; images are resized within the limits of its directory.
        temperature: 0 decodes greedily; above 0 tokens are sampled.
    """

    def __init__(self, predictor: Predictor, *, temperature: float = 0.0) -> None:
        self.predictor = predictor
        self.temperature = temperature
        self.turns: list[dict[str, Any]] = []  # messages of the chat template
        self.images: list[Path] = []

    def clear(self) -> None:
        """Forget all turns."""
        self.turns, self.images = [], []

    def ask(self, text: str, images: Sequence[Path] = ()) -> Iterator[str]:
        """Generate the answer to the next question; the turn is kept, also if the caller closes the iterator early.

        Args:
            text: The question; without IMAGE_MARK, the images precede it.
            images: Image files, one for each IMAGE_MARK of `text` if it has any.

        Raises:
            EvaluationError: An image cannot be read, or the conversation is too long. The turn is not kept.
        """
        num_marks = text.count(IMAGE_MARK)
        if num_marks not in (0, len(images)):
            raise EvaluationError(
                f"question: has {num_marks} {IMAGE_MARK} placeholders for {len(images)} images. Attach one image for each, or "
                "remove the placeholders."
            )
        question = text if num_marks else IMAGE_MARK * len(images) + text
        if images:
            _ = self.predictor.multiple  # refuses images if the model has no image processor
        turns = [*self.turns, {"role": "user", "content": self.predictor.content(question)}]
        all_images = [*self.images, *images]
        inputs = self._inputs(turns, all_images)
        pieces: list[str] = []
        generation = Generation(self.predictor, inputs, self.temperature)
        try:
            for piece in generation.pieces():
                pieces.append(piece)
                yield piece
        finally:
            generation.stop()
            if generation.error is None:
                answer = "".join(pieces).strip()
                self.turns = [*turns, {"role": "assistant", "content": answer}]
                self.images = all_images
        if generation.error is not None:
            raise generation.error

    def _inputs(self, turns: list[dict[str, Any]], images: list[Path]) -> Any:
        predictor = self.predictor
        prompt = predictor.processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        item = Item(id="chat", task="chat", images=tuple(images), question="", answer="")
        inputs = predictor.encode([prompt], predictor.questions([item], min_pixels=None, max_pixels=None))
        limit = getattr(predictor.model.config.get_text_config(), "max_position_embeddings", None)
        length = inputs["input_ids"].shape[1]
        if limit is not None and length + predictor.config.max_new_tokens > limit:
            raise EvaluationError(
                f"conversation: {length} tokens and an answer of {predictor.config.max_new_tokens} exceed the {limit} positions "
                "of the model. Clear the conversation, use fewer or smaller images, or lower --max-new-tokens."
            )
        return inputs


class Generation:
    """One `generate` call in a thread, so that the caller can stop it between two tokens.

    Args:
        inputs: Token ids and patches of the images, as Predictor.encode returns them.
        temperature: 0 decodes greedily.
    """

    def __init__(self, predictor: Predictor, inputs: Any, temperature: float) -> None:
        from transformers import TextIteratorStreamer

        self.error: BaseException | None = None
        self._stopped = threading.Event()
        tokenizer = predictor.tokenizer
        self._streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._thread = threading.Thread(target=self._run, args=(predictor, inputs, temperature), daemon=True)

    def pieces(self) -> Iterator[str]:
        """Text as it is generated."""
        self._thread.start()
        yield from self._streamer

    def stop(self) -> None:
        """End after the current token, and wait for it."""
        self.request_stop()
        if self._thread.ident is not None:
            self._thread.join()

    def request_stop(self) -> None:
        """End after the current token."""
        self._stopped.set()

    def _run(self, predictor: Predictor, inputs: Any, temperature: float) -> None:
        import torch
        from transformers import GenerationConfig

        tokenizer = predictor.tokenizer
        config = GenerationConfig(
            max_new_tokens=predictor.config.max_new_tokens,
            do_sample=temperature > 0,
            temperature=temperature if temperature > 0 else None,
            use_cache=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )

        def is_stopped(input_ids: Any, scores: Any, **_: Any) -> Any:
            return torch.full((len(input_ids),), self._stopped.is_set(), device=input_ids.device)

        try:
            with torch.inference_mode():
                predictor.model.generate(
                    **inputs.to(predictor.device),
                    generation_config=config,
                    streamer=self._streamer,
                    stopping_criteria=[is_stopped],
                )
        except BaseException as error:  # raised again in the thread of the caller
            self.error = error
        finally:
            self._streamer.end()  # also after an error, or the caller would wait forever
