# SPDX-License-Identifier: Apache-2.0
"""Loss and token accuracy on held-out samples, by source, in any parallel layout.

Called by the loop between two steps; progress.py decides what follows from the loss. The packs are those of the data
order over the validation sources, each sample once, in an order that depends on neither the step nor the number of
ranks. Training is not changed: no gradient, router statistic or random number is computed, and the loader of the
training data is not used.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mindvl_data import DataConfig
from mindvl_train.agreement import agree_on_failed_samples
from mindvl_train.errors import TrainError
from mindvl_train.interfaces import Batch, BatchSource
from mindvl_train.megatron.checkpoint import unwrap
from mindvl_train.megatron.pipeline import forward_only
from mindvl_train.parallel_state import ParallelState, any_rank
from mindvl_train.resolved_run import ResolvedRun
from mindvl_train.validation.config import ValidationConfig
from mindvl_train.validation.generations import Generator

logger = logging.getLogger(__name__)

_PACKS_PER_STAGE = 4  # of one schedule; more would shorten the bubble of the pipeline further, but pad more packs
_SUMS = 5  # of each source: loss, loss tokens, correct tokens, samples, failed samples; a last row has the packs


class ValidationSource(BatchSource, Protocol):
    """A source of packs that can be set back."""

    def report(self) -> dict[str, Any]:
        """Statistics of the packs so far; `dropped` counts samples that fit no pack."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Result of one validation, the same on every rank."""

    step: int
    loss: float  # nats per loss token
    token_accuracy: float  # fraction of loss tokens that are the most likely token
    loss_by_source: dict[str, float]
    token_accuracy_by_source: dict[str, float]
    packs: int
    samples: int
    loss_tokens: int
    failed_samples: int
    dropped_samples: int  # too long or unusable
    seconds: float

    def measure(self, name: str | None) -> float:
        """The loss of a source, nan if it has no loss tokens; None: of all."""
        return self.loss if name is None else self.loss_by_source.get(name, math.nan)


def validation_data(data: DataConfig, config: ValidationConfig) -> DataConfig:
    """The data section of the validation: that of training with other sources, one epoch, and without logs.

    Packs are not balanced over steps, so that they depend on neither the global batch size nor the number of ranks.
    """
    return replace(
        data,
        sources=tuple(replace(source, max_epochs=1) for source in config.sources),
        packing=replace(data.packing, balance_steps=1),
        seed=0,
        weight_unit="samples",
        text_share=None,
        audit_log=None,
        quarantine_log=None,
    )


def packs_at_once(run: ResolvedRun) -> int:
    """Packs of one schedule over all data-parallel ranks; enough for a pipeline, otherwise one on each rank."""
    pp_size = run.parallel.pp_size
    return run.dp_size * (1 if pp_size == 1 else min(run.num_microbatches, _PACKS_PER_STAGE * pp_size))


class Validator:
    """Validates the models of a run; every method is collective over all ranks.

    Args:
        source: Packs of this rank, at the start; `packs_at_once(run)` of all ranks form a step of it.
        models: The model chunks of this pipeline rank.
        generator: Answers prompts after a validation, if the recipe has some.
    """

    def __init__(
        self,
        run: ResolvedRun,
        source: ValidationSource,
        models: Sequence[torch.nn.Module],
        ranks: ParallelState,
        generator: Generator | None = None,
    ) -> None:
        assert run.config.validation is not None
        self.config, self.generator = run.config.validation, generator
        self._run, self._source, self._models, self._ranks = run, source, models, ranks
        self._names = [one.name for one in self.config.sources]
        self._start = source.state_dict()
        self._has_warned = False

    @property
    def data(self) -> str:
        """Digest of the samples and of the measure: losses of another digest cannot be compared."""
        identities = {name: value for name, value in self._start["identities"].items() if name != "global_batch_size"}
        content = json.dumps([identities, self.config.max_packs, self.config.measure], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def validate(
        self, step: int, *, should_stop: Callable[[], bool], begin: Callable[[], None] = lambda: None
    ) -> Validation | None:
        """Compute the loss of all packs.

        Args:
            step: Finished steps of the run.
            should_stop: Called before each group of packs; if true on a rank, the validation ends without a result.
            begin: Called at the start of each group of packs.

        Returns:
            The result; None if a stop was requested.

        Raises:
            TrainError: No validation sample has a loss token.
        """
        began = time.monotonic()
        sums = self._no_sums()
        self._source.load_state_dict(self._start)
        first = 0  # number of the first pack of the group, over all ranks
        limit = self.config.max_packs or math.inf
        while first < limit and not self._source.is_used_up():
            begin()
            if any_rank(should_stop(), self._ranks.device):
                return None
            packs = self._next_packs()
            numbers = [first + self._ranks.dp_rank + index * self._ranks.dp_size for index in range(len(packs))]
            is_counted = [number < limit for number in numbers]
            sums += self._sums(packs, is_counted)
            first += len(packs) * self._ranks.dp_size
        return self._result(step, self._reduced(sums), seconds=time.monotonic() - began)

    def _next_packs(self) -> list[Batch]:
        count = packs_at_once(self._run) // self._ranks.dp_size
        packs = [next(self._source) for _ in range(count)]
        group = self._ranks.model_parallel_group
        return packs if group is None else agree_on_failed_samples(packs, self._source, group)

    def _no_sums(self) -> Tensor:
        return torch.zeros(len(self._names) + 1, _SUMS, dtype=torch.float64)

    def _sums(self, packs: Sequence[Batch], is_counted: Sequence[bool]) -> Tensor:
        """Sums of this rank [sources + 1, _SUMS].

        Args:
            is_counted: False for packs beyond max_packs, which are computed because every rank must take part.
        """
        with ExitStack() as stack:
            predictions = [stack.enter_context(unwrap(model).predictions()) for model in self._models]  # type: ignore[operator]
            forward_only(self._models, packs, self._ranks.device)
            predicted = [one.by_segment for of_model in predictions for one in of_model]
        sums = self._no_sums()
        number = {name: index for index, name in enumerate(self._names)}
        # Tensor-parallel ranks have the same losses; the stages before the last have none.
        of_packs = zip_longest(packs, is_counted, predicted if self._ranks.tp_rank == 0 else ())
        for pack, by_segment in ((pack, values) for pack, counts, values in of_packs if counts):
            values = None if by_segment is None else by_segment.cpu().double()
            sums[-1, 0] += self._ranks.is_first_in_group and len(pack.samples) > 0
            for index, sample in enumerate(pack.samples):
                row = sums[number[sample.source]]
                if values is not None:
                    row[:3] += values[:, index]
                if self._ranks.is_first_in_group:
                    row[3] += not sample.failed
                    row[4] += sample.failed
        return sums

    def _reduced(self, sums: Tensor) -> list[list[float]]:
        """Sums over all ranks."""
        # NPUs do not reduce float64; the counts of a validation are exact in float32 up to 2^24.
        dtype = torch.float32 if self._ranks.device.type == "npu" else torch.float64
        total = sums.to(self._ranks.device, dtype)
        dist.all_reduce(total)
        reduced: list[list[float]] = total.tolist()
        return reduced

    def _result(self, step: int, sums: list[list[float]], *, seconds: float) -> Validation:
        *sums, (packs, *_) = sums
        loss, tokens, correct, samples, failed = (sum(column) for column in zip(*sums, strict=True))
        if not tokens:
            raise TrainError(
                f"validation.sources: {int(samples)} samples have no loss token, so there is no loss. Name sources with "
                "answers, or remove the section."
            )
        with_loss = {name: row for name, row in zip(self._names, sums, strict=True) if row[1]}
        report = self._source.report()
        dropped = sum(report["dropped"].values())
        if dropped and not self._has_warned and self._ranks.is_first:
            counts = ", ".join(f"{count} of {name}" for name, count in report["dropped"].items())
            logger.warning("validation.sources: %d samples are not validated: %s", dropped, counts)
        self._has_warned = True
        return Validation(
            step=step,
            loss=loss / tokens,
            token_accuracy=correct / tokens,
            loss_by_source={name: row[0] / row[1] for name, row in with_loss.items()},
            token_accuracy_by_source={name: row[2] / row[1] for name, row in with_loss.items()},
            packs=int(packs),
            samples=int(samples),
            loss_tokens=int(tokens),
            failed_samples=int(failed),
            dropped_samples=dropped,
            seconds=seconds,
        )
