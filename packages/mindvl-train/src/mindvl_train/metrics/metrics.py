# SPDX-License-Identifier: Apache-2.0
"""Numbers of a run: gathered every step without further waits for the device, reduced over ranks once per report.

Comes after the step; sinks.py writes what this makes. docs/reference/metrics.md defines every number.
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

from mindvl_model.counts import num_mtp_layers
from mindvl_model.parameters import PARTS
from mindvl_train.megatron.checkpoint import unwrap
from mindvl_train.megatron.part_norms import squared_norms
from mindvl_train.metrics.pack_tally import MODALITIES, PackCounts, PackTally, RunFacts
from mindvl_train.metrics.step_clock import PHASES, StepClock
from mindvl_train.metrics.step_split import RankTime, split_step
from mindvl_train.parallel_state import ParallelState
from mindvl_train.state import TrainState
from mindvl_train.step import StepReport

logger = logging.getLogger(__name__)

_ROUTER_FIGURES = ("load", "entropy", "bias_low", "bias_high", "aux_loss")


class Sink(Protocol):
    """Takes one report; exists on the first rank only."""

    def write(self, report: dict[str, Any]) -> None:
        """Write one report: numbers by name, and dictionaries of numbers."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class Metrics:
    """Sums since the last report."""

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
        # NPUs reduce no float64; one report's sums are well inside float32.
        self._dtype = torch.float32 if ranks.device.type == "npu" else torch.float64
        for model in self._models:
            model.take_segment_losses()  # of whoever ran the model before
        self._steps = 0
        self._counts = [0, 0]  # loss tokens, tokens
        self._tally = PackTally(facts)
        self._start_anew()

    def begin(self, part: str, step: int) -> None:
        """A part of a step begins; the step that comes before a report is measured."""
        if part == "data" and step % self.every_steps == 0:
            self._clock.start()
        self._clock.begin(part)

    def add(self, state: TrainState, step: StepReport, *, report_now: bool) -> float | None:
        """Count one step and report when it is due; returns the mean loss since the last report when it was."""
        self._clock.stop()
        self._loss_sum += step.loss_sum
        counted = (step.num_loss_tokens, step.num_tokens)
        self._counts = [before + now for before, now in zip(self._counts, counted, strict=True)]
        self._steps += 1
        self._tally.add_step(step.packs)
        self._take_losses(step)
        if state.step % self.every_steps == 0 or report_now:
            return self._report(state, step)
        return None

    def add_save(self, seconds: float) -> None:
        """A checkpoint kept training waiting; that is told apart from steps."""
        self._saving_s += seconds

    def close(self) -> None:
        """Close every sink."""
        self._clock.stop()
        for sink in self.sinks:
            self._told(sink.close)

    def _told(self, tell: Callable[..., None], *report: dict[str, Any]) -> None:
        """Numbers that a full disk does not take must not end the run."""
        try:
            tell(*report)
        except OSError as error:
            logger.warning("a report could not be written (%s); the run goes on", error)

    def _take_losses(self, step: StepReport) -> None:
        """What the models kept of a step; those of a step that was left out are dropped, as they may be no numbers."""
        by_pack = [losses for model in self._models for losses in model.take_segment_losses()]
        of_mtp = [tally for model in self._models if (tally := model.take_mtp_loss()) is not None]
        if not step.was_applied:
            return
        for tally in of_mtp:
            self._mtp += tally
        for pack, losses in zip(step.packs, by_pack, strict=True) if by_pack else ():
            self._classes += self._tally.classes(pack)
            self._segment_losses.append(losses[:, : len(pack.samples)])

    def _start_anew(self) -> None:
        self._loss_sum = torch.zeros((), dtype=self._dtype, device=self._ranks.device)
        self._mtp = torch.zeros(num_mtp_layers(self._facts.model.language), 2, device=self._ranks.device)
        self._counts = [0, 0]
        self._tally = PackTally(self._facts)
        self._segment_losses: list[Tensor] = []  # [2, samples] of each pack, where this rank computes losses
        self._classes: list[int] = []  # of all those samples
        self._since, self._saving_s = time.perf_counter(), 0.0
        self._steps = 0

    def _report(self, state: TrainState, step: StepReport) -> float:
        elapsed = time.perf_counter() - self._since - self._saving_s
        (loss_tokens, tokens), counts, tokens_by_source = self._reduced_counts()
        sums = self._reduced_sums(state, step)
        ranks = self._gathered()
        state.loss_tokens += loss_tokens
        state.tokens += tokens
        if state.placeholders is not None:
            state.placeholders += counts.placeholders
        loss = float(sums["loss"][0]) / loss_tokens if loss_tokens else math.nan  # all steps were left out
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
        for sink in self.sinks:
            self._told(sink.write, report)
        self._start_anew()
        return loss

    def _reduced_counts(self) -> tuple[list[int], PackCounts, list[int]]:
        """Over all ranks: loss tokens and tokens; counts of packs; tokens by source."""
        # The step counts its packs on one of the ranks that train them; so does this.
        speaks = int(self._ranks.is_first_in_group)
        of_packs = [*asdict(self._tally.counts).values(), *self._tally.tokens_by_source]
        values = torch.tensor([*self._counts, *(speaks * value for value in of_packs)], device=self._ranks.device)
        dist.all_reduce(values)
        reduced = values.tolist()
        end = len(self._counts) + len(fields(PackCounts))
        return reduced[: len(self._counts)], PackCounts(*reduced[len(self._counts) : end]), reduced[end:]

    def _reduced_sums(self, state: TrainState, step: StepReport) -> dict[str, Tensor]:
        """Everything that is added up over ranks as a fraction, in one collective; on the host."""
        ranks, config = self._ranks, self._facts.model.language
        is_counted = ranks.tp_rank == 0  # tensor-parallel peers have the same losses
        pieces = {
            "loss": self._loss_sum.reshape(1),
            "tflop": torch.tensor([ranks.is_first_in_group * sum(map(sum, self._tally.work))], dtype=torch.float64),
            "classes": is_counted * self._sums_by_class().flatten(),
            "norms": squared_norms(state.optimizer, state.models) if self._models else torch.zeros(len(PARTS)),
            "mtp": is_counted * self._mtp.flatten(),
            "routers": self._router_figures(config.num_layers + num_mtp_layers(config)).flatten(),
        }
        together = torch.cat([piece.to(ranks.device, self._dtype) for piece in pieces.values()])
        dist.all_reduce(together)
        together = together.cpu()
        ends = accumulate((len(piece) for piece in pieces.values()), initial=0)
        return {name: together[start:end] for name, (start, end) in zip(pieces, pairwise(ends), strict=True)}

    def _sums_by_class(self) -> Tensor:
        """Sum of losses and loss tokens [classes, 2] of this rank."""
        sums = torch.zeros(len(self._facts.sources) * len(MODALITIES), 2, device=self._ranks.device)
        if self._segment_losses:
            numbers = torch.tensor(self._classes, dtype=torch.int64, device=self._ranks.device)
            sums.index_add_(0, numbers, torch.cat(self._segment_losses, dim=1).T)
        return sums

    def _router_figures(self, num_layers: int) -> Tensor:
        """[layers, figures] of the last step; of all ranks that know a layer one tells it."""
        ranks = self._ranks
        figures = torch.zeros(num_layers, len(_ROUTER_FIGURES), device=ranks.device)
        if ranks.dp_rank == ranks.tp_rank == ranks.cp_rank == 0:
            for one in (statistics for model in self._models for statistics in model.router_statistics()):
                nothing = one.entropy.new_zeros(1)
                bias = nothing if one.bias is None else one.bias
                aux_loss = nothing[0] if one.aux_loss is None else one.aux_loss
                figures[one.layer] = torch.stack((one.max_violation + 1, one.entropy, bias.min(), bias.max(), aux_loss))
        return figures

    def _gathered(self) -> Tensor:
        """What ranks are compared by [ranks, values]: ranks, memory, phases of the measured step, work of each step."""
        seconds = self._clock.take() or dict.fromkeys(PHASES, math.nan)
        work = [value for pair in self._tally.work for value in pair]
        mine = [self._ranks.dp_rank, self._ranks.pp_rank, *_memory_gb(self._ranks.device), *seconds.values(), *work]
        own = torch.tensor(mine, dtype=self._dtype, device=self._ranks.device)
        everyone = [torch.empty_like(own) for _ in range(self._ranks.num_ranks)]
        dist.all_gather(everyone, own)
        return torch.stack(everyone).cpu()

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
                RankTime(int(pack[0]), int(pack[1]), dict(zip(PHASES, values, strict=True)))
                for pack, values in zip(ranks.tolist(), phases.tolist(), strict=True)
            ]
            result["step_split"] = vars(split_step(times))
        return result


def _losses(classes: Tensor, sources: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Mean losses from sums [sources, modalities, 2] of losses and loss tokens; what has no tokens is left out."""
    by_source, by_modality = classes.sum(dim=1).tolist(), classes.sum(dim=0).tolist()
    return {
        "loss_by_source": {name: loss / count for name, (loss, count) in zip(sources, by_source, strict=True) if count},
        "loss_by_modality": {
            name: loss / count for name, (loss, count) in zip(MODALITIES, by_modality, strict=True) if count
        },
    }


def _norms(squares: Tensor, grad_norm: float) -> dict[str, dict[str, float]]:
    """Norms by part before clipping, which changes all gradients by one factor."""
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
    """Figures of each layer with experts, by name; a layer without them has no load."""
    layers = [(str(layer), pack) for layer, pack in enumerate(figures.tolist()) if pack[0]]
    if not layers:
        return {}
    return {
        "routers": {
            name: {layer: pack[index] for layer, pack in layers}
            for index, name in enumerate(_ROUTER_FIGURES)
            if index < 2 or any(pack[index] for _, pack in layers)
        }
    }


def _speed(tflops: float, peak: float | None) -> dict[str, float]:
    return {"tflops_per_device": tflops} | ({} if peak is None else {"mfu": tflops / peak})


def _memory_gb(device: torch.device) -> tuple[float, float]:
    """10^9 bytes used now, and at most so far: by torch's allocator on a device, by the process on a CPU."""
    if device.type == "cpu":
        used = psutil.Process().memory_info().rss
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # noted now and then, so it may be behind
        return used / 1e9, max(used, peak) / 1e9
    module = torch.get_device_module(device)
    return module.memory_allocated(device) / 1e9, module.max_memory_allocated(device) / 1e9
