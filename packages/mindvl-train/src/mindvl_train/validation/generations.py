# SPDX-License-Identifier: Apache-2.0
"""Greedy answers to fixed prompts under the parallel layout of the run.

Called by the loop after a validation. There is no cache of keys and values: each new token costs one forward pass over
the prompt and the answer so far, so an answer of n tokens costs about as much as n validation samples of its length.
Prompts are distributed over data-parallel ranks; each is one microbatch of the schedule of the pipeline.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from mindvl_data import DataError, load_tokenizer
from mindvl_data.order.sources import SourceIndex, source_rules
from mindvl_data.prompts import Prompt, first_prompts, plain_text, prompt_batch, read_prompts
from mindvl_data.shards.files import ShardFiles
from mindvl_train.errors import TrainError
from mindvl_train.megatron.checkpoint import unwrap
from mindvl_train.megatron.pipeline import forward_only
from mindvl_train.parallel_state import ParallelState, any_rank, first_message
from mindvl_train.resolved_run import ResolvedRun
from mindvl_train.validation.config import ValidationConfig


class Generator:
    """Answers the prompts of `validation.generations`; every method is collective over all ranks.

    Args:
        models: The model chunks of this pipeline rank.

    Raises:
        DataError: A prompt cannot be read.
        TrainError: Another rank cannot read one.
    """

    def __init__(
        self, run: ResolvedRun, config: ValidationConfig, models: Sequence[torch.nn.Module], ranks: ParallelState
    ) -> None:
        assert config.generations is not None
        self._run, self._models, self._ranks = run, models, ranks
        self._most = config.generations.max_new_tokens
        self._tokenizer = load_tokenizer(run.config.data.tokenizer)
        failure: DataError | None = None
        try:
            self._prompts = list(self._read(config))
            self._check_lengths()
        except DataError as error:
            failure = error
        problem = first_message(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        if problem is not None:
            raise TrainError(problem)

    def generate(self, *, should_stop: Callable[[], bool], begin: Callable[[], None]) -> list[dict[str, Any]] | None:
        """Answer all prompts.

        Args:
            should_stop: Called before each token; if true on a rank, the answers are dropped.
            begin: Called before each token.

        Returns:
            name, prompt, answer, expected and num_tokens of each prompt, on every rank; None if a stop was requested.
        """
        ranks, end = self._ranks, self._run.model.tokens.end_of_turn
        own = list(range(ranks.dp_rank, len(self._prompts), ranks.dp_size))
        answers: dict[int, list[int]] = {number: [] for number in own}
        for _ in range(self._most):
            begin()
            open_ = [number for number in own if answers[number][-1:] != [end]]
            if any_rank(should_stop(), ranks.device):
                return None
            if not any_rank(bool(open_), ranks.device):
                break
            for number, token in zip(open_, self._next_tokens(open_, answers), strict=True):
                answers[number].append(token)
        gathered: list[Any] = [None] * ranks.num_ranks
        dist.all_gather_object(gathered, answers if ranks.is_first_in_group else {})
        everything = {number: ids for one in gathered for number, ids in one.items()}
        return [
            {
                "name": prompt.name,
                "prompt": prompt.text,
                "answer": plain_text(everything[number], self._tokenizer),
                "expected": prompt.expected,
                "num_tokens": len(everything[number]),
            }
            for number, prompt in enumerate(self._prompts)
        ]

    def _next_tokens(self, numbers: Sequence[int], answers: dict[int, list[int]]) -> list[int]:
        """The most likely next token of each of these prompts of this rank."""
        packs = [self._batch(self._prompts[number], answers[number]) for number in numbers]
        packs += [self._batch(None, ())] * (self._num_packs() - len(packs))
        with ExitStack() as stack:
            recorded = [stack.enter_context(unwrap(model).predictions()) for model in self._models]  # type: ignore[operator]
            forward_only(self._models, packs, self._ranks.device)
            predicted = [one.tokens for of_model in recorded for one in of_model]
        # Only ranks of the last stage predict, and of context-parallel ranks only the one that has the last token.
        found = torch.full((len(numbers),), -1, dtype=torch.int64)
        for index, tokens in enumerate(predicted[: len(numbers)]):
            if len(tokens):
                found[index] = tokens[0].cpu()
        if self._ranks.model_parallel_group is not None:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._ranks.model_parallel_group)
        return [int(one) for one in found.tolist()]

    def _num_packs(self) -> int:
        """Microbatches of one schedule, the same on every rank; interleaved stages need a multiple of their number."""
        parallel = self._run.parallel
        multiple = parallel.pp_size if parallel.virtual_stages > 1 else 1
        most = -(-len(self._prompts) // self._ranks.dp_size)
        return -(-most // multiple) * multiple

    def _batch(self, prompt: Prompt | None, answer: Sequence[int]) -> Any:
        return prompt_batch(
            prompt,
            answer,
            config=self._run.config.data,
            tokenizer=self._tokenizer,
            position_kind=self._run.model.position_kind,
        )

    def _read(self, config: ValidationConfig) -> Iterator[Prompt]:
        data, generations = self._run.config.data, config.generations
        assert generations is not None
        if generations.prompts is not None:
            rules = source_rules(config.sources[0], data)
            yield from read_prompts(generations.prompts, rules=rules, tokenizer=self._tokenizer)
        if generations.first_samples:
            files = ShardFiles(data.store)
            try:
                for source in config.sources:
                    index = SourceIndex(source, data, self._tokenizer, files)
                    yield from first_prompts(index, generations.first_samples, tokenizer=self._tokenizer)
            finally:
                files.close()

    def _check_lengths(self) -> None:
        longest = self._run.config.data.packing.seq_length
        for prompt in self._prompts:
            if len(prompt.sample.input_ids) > longest:
                raise DataError(
                    f"{prompt.name}: the prompt has {len(prompt.sample.input_ids)} tokens, more than "
                    f"data.packing.seq_length={longest}. Use a shorter prompt, or images with fewer pixels."
                )
