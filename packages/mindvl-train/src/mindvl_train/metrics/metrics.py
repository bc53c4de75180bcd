# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run: accumulated every step without device synchronization, reduced over ranks once per report.

Comes after the step; sinks.py writes the reports. docs/reference/metrics.md defines every metric.
"""

import logging
import math
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from mindvl_model.parameters import PARTS
from mindvl_train.megatron.checkpoint import unwrap
from mindvl_train.megatron.part_norms import squared_norms
from mindvl_train.metrics.pack_counts import MODALITIES, PackCounter, PackCounts, RunFacts
from mindvl_train.metrics.step_clock import PHASES, StepClock
from mindvl_train.metrics.step_split import RankTime, split_step
from mindvl_train.parallel_state import ParallelState
from mindvl_train.state import TrainState
from mindvl_train.step import StepReport

logger = logging.getLogger(__name__)

_ROUTER_FIGURES = ("load", "entropy", "bias_low", "bias_high", "aux_loss")
_MANY_REPEATED = 0.02  # fraction of all steps above which a warning proposes a larger capacity


class Sink(Protocol):
    """Writes reports; exists on rank 0 only."""

    def write(self, report: dict[str, Any]) -> None:
        """Write one report: numbers by name, and groups of numbers as dictionaries."""

    def write_validation(self, report: dict[str, Any]) -> None:
        """Write the result of one validation."""

    def close(self) -> None:
        """Flush and close."""


class Metrics:
    """Accumulates metrics since the last report."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        every_steps: int,
        ranks: ParallelState,
        facts: RunFacts,
        models: Sequence[torch.nn.Module] = (),
    ) -> None:
        self.sinks, self.every_steps, self._ranks, self._facts = sinks, every_steps, ranks, facts
        self._models: list[Any] = [unwrap(model) for model in models]
        self._clock = StepClock(ranks.device, self._models)
        messages = [model.language.expert_messages for model in self._models]
        self._expert_messages = [one for one in messages if one is not None]
        # NPUs do not reduce float64; the sums of one report fit into float32.
        self._dtype = torch.float32 if ranks.device.type == "npu" else torch.float64
        for model in self._models:
            model.take_segment_losses()  # losses of earlier runs of the model
        self._steps = self._repeated = 0
        self._counts = [0, 0]  # loss tokens, tokens
        self._counter = PackCounter(facts)
        self._reset()

    def begin(self, part: str, step: int) -> None:
        """Called at the start of each part of a step; the step before a report is timed."""
        if part == "data" and step % self.every_steps == 0:
            self._clock.start()
        self._clock.begin(part)

    def add(self, state: TrainState, step: StepReport, *, report_now: bool) -> float | None:
        """Add one step, and report if it is due; returns the mean loss since the last report, or None without a report."""
        self._clock.stop()
        self._loss_sum += step.loss_sum
        counted = (step.num_loss_tokens, step.num_tokens)
        self._counts = [before + now for before, now in zip(self._counts, counted, strict=True)]
        self._steps += 1
        self._repeated += step.was_repeated
        self._counter.add_step(step.packs)
        self._take_losses(step)
        if state.step % self.every_steps == 0 or report_now:
            return self._report(state, step)
        return None

    def add_save(self, seconds: float) -> None:
        """Add the time that training waited for a save; it is excluded from the time of steps."""
        self._saving_s += seconds

    def add_validation(self, report: dict[str, Any] | None, seconds: float) -> None:
        """Write the result of a validation.

        Args:
            report: None: the validation ended without a result.
            seconds: Its time, which is excluded from the time of steps.
        """
        self._validating_s += seconds
        for sink in self.sinks if report is not None else ():
            self._call_sink(sink.write_validation, report)

    def stop_clock(self) -> None:
        """Called when a step is done and something else follows before `add`."""
        self._clock.stop()

    def close(self) -> None:
        """Close every sink."""
        self._clock.stop()
        for sink in self.sinks:
            self._call_sink(sink.close)

    def _call_sink(self, method: Callable[..., None], *report: dict[str, Any] | None) -> None:
        """Call a method of a sink; an I/O error does not end the run."""
        try:
            method(*report)
        except OSError as error:
            logger.warning("metrics: a report could not be written (%s); training continues", error)

    def _take_losses(self, step: StepReport) -> None:
        """Take the losses of a step from the models; those of a skipped step are dropped, because they may not be finite."""
        by_pack = [losses for model in self._models for losses in model.take_segment_losses()]
        of_mtp = [loss for model in self._models if (loss := model.take_mtp_loss()) is not None]
        if not step.was_applied:
            return
        for mtp_loss in of_mtp:
            self._mtp += mtp_loss
        for pack, losses in zip(step.packs, by_pack, strict=True) if by_pack else ():
            self._classes += self._counter.classes(pack)
            self._segment_losses.append(losses[:, : len(pack.samples)])

    def _reset(self) -> None:
        self._loss_sum = torch.zeros((), dtype=self._dtype, device=self._ranks.device)
        self._mtp = torch.zeros(self._facts.model.language.num_mtp_layers, 2, device=self._ranks.device)
        self._counts = [0, 0]
        self._counter = PackCounter(self._facts)
        self._segment_losses: list[Tensor] = []  # [2, samples] of each pack, on ranks that compute losses
        self._classes: list[int] = []  # class of each of these samples
        self._since, self._saving_s, self._validating_s = time.perf_counter(), 0.0, 0.0
        self._steps = self._repeated = 0

    def _report(self, state: TrainState, step: StepReport) -> float:
        elapsed = time.perf_counter() - self._since - self._saving_s - self._validating_s
        (loss_tokens, tokens), counts, tokens_by_source = self._reduced_counts()
        sums = self._reduced_sums(state, step)
        ranks = self._gathered()
        state.loss_tokens += loss_tokens
        state.tokens += tokens
        if state.placeholders is not None:
            state.placeholders += counts.placeholders
        loss = float(sums["loss"][0]) / loss_tokens if loss_tokens else math.nan  # nan: all steps were skipped
        report: dict[str, Any] = {
            "step": state.step,
            "loss": loss,
            "learning_rate": step.learning_rate,
            "grad_norm": step.grad_norm,
            "loss_tokens": state.loss_tokens,
            "tokens": state.tokens,
            "patches_per_step": counts.visual_tokens * self._facts.model.vision.spatial_merge_size**2 / self._steps,
            "tokens_per_s": tokens / elapsed,
            "samples_per_s": counts.samples / elapsed,
            "seconds_per_step": elapsed / self._steps,
            "packing_efficiency": counts.sample_tokens / max(1, counts.packs * self._facts.seq_length),
            "checkpoint_s": self._saving_s,
            "skipped_steps": state.skipped,
            "since_last": {
                "steps": self._steps,
                **asdict(counts),
                "loss_tokens": loss_tokens,
                "tokens": tokens,
                "tflop": float(sums["tflop"][0]),
            },
            "tokens_by_source": {
                name: count for name, count in zip(self._facts.sources, tokens_by_source, strict=True) if count
            },
            **_losses(sums["classes"].reshape(len(self._facts.sources), len(MODALITIES), 2), self._facts.sources),
            **_norms(sums["norms"], step.grad_norm),
            **_routers(sums["routers"].reshape(-1, len(_ROUTER_FIGURES))),
            **_speed(float(sums["tflop"][0]) / elapsed / self._ranks.num_ranks, self._facts.peak_tflops),
            **self._of_ranks(ranks),
        }
        depths = [(losses, labels) for losses, labels in sums["mtp"].reshape(-1, 2).tolist() if labels]
        if depths:
            report["mtp_loss"] = {str(depth): losses / labels for depth, (losses, labels) in enumerate(depths, start=1)}
        if self._expert_messages:
            report |= {"repeated_steps": state.repeated, "expert_capacity_needed": float(sums["capacity"].max())}
            self._warn_of_repeated(state, report["expert_capacity_needed"])
        factors = self._facts.rate_factors
        if factors:
            report["learning_rate_by_part"] = {part: step.learning_rate * factor for part, factor in factors.items()}
        for sink in self.sinks:
            self._call_sink(sink.write, report)
        self._reset()
        return loss

    def _reduced_counts(self) -> tuple[list[int], PackCounts, list[int]]:
        """Over all ranks: loss tokens and tokens; counts of packs; tokens by source."""
        # Each pack is counted by exactly one rank: the first of its model-parallel group.
        counts_packs = int(self._ranks.is_first_in_group)
        of_packs = [*asdict(self._counter.counts).values(), *self._counter.tokens_by_source]
        values = torch.tensor([*self._counts, *(counts_packs * value for value in of_packs)], device=self._ranks.device)
        dist.all_reduce(values)
        reduced = values.tolist()
        end = len(self._counts) + len(fields(PackCounts))
        return reduced[: len(self._counts)], PackCounts(*reduced[len(self._counts) : end]), reduced[end:]

    def _reduced_sums(self, state: TrainState, step: StepReport) -> dict[str, Tensor]:
        """Floating-point sums over ranks, reduced in one collective; on the host."""
        ranks, config = self._ranks, self._facts.model.language
        is_counted = ranks.tp_rank == 0  # all tensor-parallel ranks have the same losses
        pieces = {
            "loss": self._loss_sum.reshape(1),
            "tflop": torch.tensor([ranks.is_first_in_group * sum(map(sum, self._counter.work))], dtype=torch.float64),
            "classes": is_counted * self._sums_by_class().flatten(),
            "norms": squared_norms(state.optimizer, state.models) if self._models else torch.zeros(len(PARTS)),
            "mtp": is_counted * self._mtp.flatten(),
            "routers": self._router_figures(config.num_layers + config.num_mtp_layers).flatten(),
            "capacity": self._needed_capacity(),
        }
        combined = torch.cat([piece.to(ranks.device, self._dtype) for piece in pieces.values()])
        dist.all_reduce(combined)
        combined = combined.cpu()
        ends = accumulate((len(piece) for piece in pieces.values()), initial=0)
        return {name: combined[start:end] for name, (start, end) in zip(pieces, pairwise(ends), strict=True)}

    def _sums_by_class(self) -> Tensor:
        """Sum of losses and loss tokens [classes, 2] of this rank."""
        sums = torch.zeros(len(self._facts.sources) * len(MODALITIES), 2, device=self._ranks.device)
        if self._segment_losses:
            numbers = torch.tensor(self._classes, dtype=torch.int64, device=self._ranks.device)
            sums.index_add_(0, numbers, torch.cat(self._segment_losses, dim=1).T)
        return sums

    def _router_figures(self, num_layers: int) -> Tensor:
        """[layers, figures] of the last step; each layer is reported by one rank."""
        ranks = self._ranks
        figures = torch.zeros(num_layers, len(_ROUTER_FIGURES), device=ranks.device)
        if ranks.dp_rank == ranks.tp_rank == ranks.cp_rank == 0:
            for one in (statistics for model in self._models for statistics in model.router_statistics()):
                zero = one.entropy.new_zeros(1)
                bias = zero if one.bias is None else one.bias
                aux_loss = zero[0] if one.aux_loss is None else one.aux_loss
                figures[one.layer] = torch.stack((one.max_violation + 1, one.entropy, bias.min(), bias.max(), aux_loss))
        return figures

    def _needed_capacity(self) -> Tensor:
        """The expert_capacity_factor that the messages of each rank needed [ranks]; zeros for other ranks."""
        ranks = self._ranks
        found = torch.zeros(ranks.num_ranks if self._expert_messages else 0, device=ranks.device)
        for messages in self._expert_messages:
            found[ranks.rank] = torch.maximum(found[ranks.rank], messages.take_factor(ranks.device))
        return found

    def _gathered(self) -> Tensor:
        """Values of all ranks [ranks, values]: coordinates, memory, phases of the timed step, work of each step."""
        seconds = self._clock.take() or dict.fromkeys(PHASES, math.nan)
        work = [value for pair in self._counter.work for value in pair]
        values = [self._ranks.dp_rank, self._ranks.pp_rank, *_memory_gb(self._ranks.device), *seconds.values(), *work]
        own = torch.tensor(values, dtype=self._dtype, device=self._ranks.device)
        # Copies and no uninitialized memory: in a rehearsal no other rank writes its part, and NaN would end the report.
        gathered = [own.clone() for _ in range(self._ranks.num_ranks)]
        dist.all_gather(gathered, own)
        return torch.stack(gathered).cpu()

    def _warn_of_repeated(self, state: TrainState, needed: float) -> None:
        if self._repeated and state.repeated > _MANY_REPEATED * state.step and self._ranks.is_first:
            logger.warning(
                "parallel.expert_capacity_factor: %d of the last %d steps were computed twice, because rows did not fit into "
                "a message to their experts. Use at least %.2f.",
                self._repeated,
                self._steps,
                math.ceil(100 * needed) / 100,
            )

    def _of_ranks(self, ranks: Tensor) -> dict[str, Any]:
        phases_end = 4 + len(PHASES)
        used, peak = ranks[:, 2].max(), ranks[:, 3].max()
        work = ranks[:, phases_end:].reshape(len(ranks), self._steps, 2).numpy()
        result: dict[str, Any] = {
            "imbalance": {
                name: float(np.mean(of_rank.max(axis=0) / np.maximum(of_rank.mean(axis=0), 1e-30)))
                for name, of_rank in (("vision", work[:, :, 0]), ("language", work[:, :, 1]))
                if of_rank.any()
            },
            "memory_gb": float(used),
            "memory_peak_gb": float(peak),
        }
        phases = ranks[:, 4:phases_end]
        if not bool(phases.isnan().any()):
            times = [
                RankTime(int(rank[0]), int(rank[1]), dict(zip(PHASES, values, strict=True)))
                for rank, values in zip(ranks.tolist(), phases.tolist(), strict=True)
            ]
            result["step_split"] = vars(split_step(times))
        return result


def _losses(classes: Tensor, sources: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Mean losses from sums [sources, modalities, 2] of losses and loss tokens, without empty classes."""
    by_source, by_modality = classes.sum(dim=1).tolist(), classes.sum(dim=0).tolist()
    return {
        "loss_by_source": {name: loss / count for name, (loss, count) in zip(sources, by_source, strict=True) if count},
        "loss_by_modality": {
            name: loss / count for name, (loss, count) in zip(MODALITIES, by_modality, strict=True) if count
        },
    }


def _norms(squares: Tensor, grad_norm: float) -> dict[str, dict[str, float]]:
    """Gradient norms of the model parts before clipping; clipping scales all gradients by the same factor."""
    total = float(squares.sum())
    if not math.isfinite(grad_norm) or not math.isfinite(total) or total == 0:
        return {}
    scale = grad_norm**2 / total
    return {
        "grad_norm_by_part": {
            name: math.sqrt(square * scale) for name, square in zip(PARTS, squares.tolist(), strict=True) if square
        }
    }


def _routers(figures: Tensor) -> dict[str, dict[str, dict[str, float]]]:
    """Router figures of each layer with experts, by name; the load of other layers is 0."""
    layers = [(str(layer), values) for layer, values in enumerate(figures.tolist()) if values[0]]
    if not layers:
        return {}
    return {
        "routers": {
            name: {layer: values[index] for layer, values in layers}
            for index, name in enumerate(_ROUTER_FIGURES)
            if index < 2 or any(values[index] for _, values in layers)
        }
    }


def _speed(tflops: float, peak: float | None) -> dict[str, float]:
    return {"tflops_per_device": tflops} | ({} if peak is None else {"mfu": tflops / peak})


def _memory_gb(device: torch.device) -> tuple[float, float]:
    """Memory in use and its peak, in GB (10^9 bytes): of torch's allocator on a device, of the process on a CPU."""
    if device.type == "cpu":
        used = psutil.Process().memory_info().rss
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # updated by the system from time to time
        return used / 1e9, max(used, peak) / 1e9
    module = torch.get_device_module(device)
    return module.memory_allocated(device) / 1e9, module.max_memory_allocated(device) / 1e9
