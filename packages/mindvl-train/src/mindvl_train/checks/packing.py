# SPDX-License-Identifier: Apache-2.0
"""Check that the samples of a pack are independent of each other, on the user's model and data, in any parallel layout.

A pack and its samples one by one must have the same loss and gradients; changed tokens and pixels of a sample must not
change the loss of other samples; and a pack without sequence lengths must differ, as a control. The main function is one
rank: `python -m mindvl_train.checks.packing JOB`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindvl_data import Batch, Loader
from mindvl_model import MindVLConfig, set_up_device
from mindvl_train.checks.bounds import BF16_NEIGHBOUR, FP32_BOUND, bound_of
from mindvl_train.checks.jobs import apart, run_job, run_rank
from mindvl_train.checks.parallel import in_layout
from mindvl_train.checks.runs import SMALL, worst_of
from mindvl_train.checks.windows import window_note
from mindvl_train.config import Precision, RunConfig
from mindvl_train.errors import TrainError
from mindvl_train.launch import world_size
from mindvl_train.resolved_run import ResolvedRun, resolve_run, tokenized_model

_SHOWS = 3.0  # required changes must exceed this multiple of the bound; random weights change little
_PACKS = 8  # the one with most samples is used


@dataclass(frozen=True, kw_only=True)
class PackingReport:
    """Relative differences of one parallel layout."""

    layout: str
    processes: int
    samples: int = 0  # samples of the pack
    tokens: int = 0
    loss: float = math.nan  # all samples packed, compared with one by one
    gradient: float = math.nan  # worst parameter, by element
    parameter: str = ""  # name of the worst parameter
    neighbour: float = math.nan  # largest change of a sample's loss when another sample is changed
    poisoned: float = math.nan  # smallest change of a changed sample's own loss
    control: float = math.nan  # smallest change of the loss if one pipeline stage ignores the sequence lengths
    loss_bound: float = FP32_BOUND
    gradient_bound: float = FP32_BOUND  # bound of that parameter
    neighbour_bound: float = FP32_BOUND
    problem: str = ""  # error that prevented the comparison
    note: str = ""  # limits of the data

    @property
    def holds(self) -> bool:
        """Whether equal values are within their bounds and required changes are large enough."""
        return (
            not self.problem
            and self.loss <= self.loss_bound
            and self.gradient <= self.gradient_bound
            and self.neighbour <= self.neighbour_bound
            and min(self.poisoned, self.control) >= _SHOWS * self.neighbour_bound
        )


def check_packing(
    config: RunConfig,
    layouts: Sequence[str],
    directory: Path,
    *,
    num_cores: int,
    precision: Precision = "fp32",
    on_layout: Callable[[str], None] = lambda name: None,
) -> list[PackingReport]:
    """Check a pack of the run's data in each parallel layout, in separate processes.

    Args:
        directory: Empty directory for the jobs.
        precision: Precision of weights and activations. In bf16 the pack is also computed in fp32, to measure the
            rounding noise.

    Raises:
        TrainError: A layout does not fit.
    """
    plain = replace(apart(config), precision=precision, global_batch_size=_PACKS)
    runs = {name: in_layout(plain, name) for name in layouts}
    reports = []
    for name, (run, processes) in runs.items():
        on_layout(name)
        report = PackingReport(layout=name, processes=processes)
        try:
            found = run_job(
                "mindvl_train.checks.packing", run, directory / name, processes=processes, num_cores=num_cores
            )
        except TrainError as error:
            reports.append(replace(report, problem=str(error)))
            continue
        worst = max(found, key=lambda one: one["gradient"] / one["gradient_bound"])
        last = next(one for one in found if "loss" in one)
        reports.append(replace(report, **(last | worst)))
    return reports


def alone(pack: Batch, number: int) -> Batch:
    """One sample of a pack as a separate pack."""
    start, stop = pack.cu_seqlens[number : number + 2].tolist()
    before, sample = pack.samples[:number], pack.samples[number]
    images, image_grids = _media(
        pack.pixel_values, pack.image_grid_thw, sum(one.num_images for one in before), sample.num_images
    )
    videos, video_grids = _media(
        pack.pixel_values_videos, pack.video_grid_thw, sum(one.num_videos for one in before), sample.num_videos
    )
    labels = pack.labels[start:stop]
    return replace(
        pack,
        input_ids=pack.input_ids[start:stop],
        labels=labels,
        position_ids=pack.position_ids[:, start:stop],
        cu_seqlens=torch.tensor([0, stop - start], dtype=torch.int32),
        max_seqlen=stop - start,
        pixel_values=images,
        image_grid_thw=image_grids,
        pixel_values_videos=videos,
        video_grid_thw=video_grids,
        loss_positions=(labels != -100).nonzero().squeeze(1).cpu(),
        samples=(sample,),
    )


def poisoned(pack: Batch, number: int, config: MindVLConfig) -> Batch:
    """The same pack with changed text and inverted pixels in one sample; labels are unchanged."""
    start, stop = pack.cu_seqlens[number : number + 2].tolist()
    special = torch.tensor([token for token in vars(config.tokens).values() if token is not None])
    is_text = ~torch.isin(pack.input_ids, special.to(pack.input_ids.device))
    words = pack.input_ids[is_text].unique()
    if len(words) == 1:  # the pack has only one distinct token
        ordinary = torch.ones(config.language.vocab_size, dtype=torch.bool).index_fill_(0, special, value=False)
        words = torch.cat((words, ordinary.nonzero()[:2, 0])).unique()
    ids = pack.input_ids.clone()
    inside = is_text.clone()
    inside[:start], inside[stop:] = False, False
    # Each token is replaced by the next distinct token of the pack.
    ids[inside] = words[(torch.searchsorted(words, ids[inside]) + 1) % len(words)]
    before, sample = pack.samples[:number], pack.samples[number]
    pixels, videos = pack.pixel_values.clone(), pack.pixel_values_videos.clone()
    for values, grids, first, count in (
        (pixels, pack.image_grid_thw, sum(one.num_images for one in before), sample.num_images),
        (videos, pack.video_grid_thw, sum(one.num_videos for one in before), sample.num_videos),
    ):
        own, _ = _media(values, grids, first, count)
        own.copy_(255 - own)  # a view
    return replace(pack, input_ids=ids, pixel_values=pixels, pixel_values_videos=videos)


def without_lengths(pack: Batch) -> Batch:
    """The same pack with the sequence lengths of a single sample."""
    length = len(pack.input_ids)
    return replace(pack, cu_seqlens=torch.tensor([0, length], dtype=torch.int32), max_seqlen=length)


def _media(values: Tensor, grids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Views of the patches [P, patch_dim] and grids [count, 3] of some images of a pack."""
    ends = torch.cat((grids.new_zeros(1), grids.prod(dim=1).cumsum(0)))
    return values[int(ends[first]) : int(ends[first + count])], grids[first : first + count]


class _Rank:
    """Model chunks of one rank, and losses and gradients of packs on them."""

    def __init__(self, run: ResolvedRun, ranks: Any) -> None:
        from mindvl_train.megatron.whole_gradients import with_whole_gradients
        from mindvl_train.weights import build_models

        self.ranks = ranks
        self.models = with_whole_gradients(build_models(run, ranks.device, load_init=True))
        for model in self.models:
            model.zero_grad_buffer()  # type: ignore[operator]

    def run(self, packs: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses of all samples in order (zeros on all stages but the last), and the gradients of the mean loss."""
        from mindvl_train.megatron.pipeline import forward_backward
        from mindvl_train.megatron.whole_gradients import sum_over_context, take_gradients

        forward_backward(self.models, packs, self.ranks.device)
        gradients = take_gradients(self.models)
        chunks: list[Any] = [model.module for model in self.models]
        found = [losses for chunk in chunks for losses in chunk.take_segment_losses()]
        if not found:
            return torch.zeros(0), gradients
        losses = torch.cat([one[0] for one in found]).to(self.ranks.device)
        return sum_over_context(losses).cpu(), gradients


def _check(config: RunConfig) -> dict[str, Any]:
    from mindvl_train.parallel_state import process_groups

    accelerator = set_up_device()
    model_config = _without_balancing(tokenized_model(config))
    run = replace(resolve_run(config, world_size()), model=model_config)
    pack = _pack(config, model_config)
    number = len(pack.samples)
    with process_groups(accelerator, config.seed, run.parallel) as ranks:
        exact = None if config.precision == "fp32" else _packed_in_fp32(run, ranks, pack)
        rank = _Rank(run, ranks)
        packed, packed_gradients = rank.run([pack])
        singly, single_gradients = rank.run([alone(pack, sample) for sample in range(number)])
        poisons = [rank.run([poisoned(pack, sample, model_config)])[0] for sample in range(number)]
        controls = [
            rank.run([without_lengths(pack) if ranks.pp_rank == stage else pack])[0].sum()
            for stage in range(ranks.pp_size)
        ]
        noise = None if exact is None else _differences(exact[1], packed_gradients, ranks.device)
        found = _differences(packed_gradients, single_gradients, ranks.device)
        worst = worst_of(found, noise) if found else worst_of({"": 0.0})
        result = {"gradient": worst.value, "gradient_bound": worst.bound, "parameter": worst.name}
        if len(packed):
            packed = packed[:number]
            changes = torch.stack([_relative(one[:number], packed) for one in poisons])  # [changed sample, sample]
            own = torch.eye(number, dtype=torch.bool)
            has_loss = torch.tensor([alone(pack, sample).num_loss_tokens > 0 for sample in range(number)])
            loss_noise = None if exact is None else float(_relative(packed.sum(), exact[0][:number].sum()))
            result |= {
                "samples": number,
                "tokens": len(pack.input_ids),
                "loss": float(_relative(singly.sum(), packed.sum())),
                "loss_bound": bound_of(loss_noise),
                "neighbour": float(changes[~own].max()),
                # Both packs have the same lengths, so that rounding is the same, also in bf16.
                "neighbour_bound": FP32_BOUND if exact is None else BF16_NEIGHBOUR,
                "poisoned": float(changes[own][has_loss].min()),
                "control": float(torch.stack([_relative(one, packed.sum()) for one in controls]).min()),
                "note": window_note([pack], model_config.vision),
            }
    return result


def _packed_in_fp32(run: ResolvedRun, ranks: Any, pack: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and gradients of the pack with the same weights in fp32."""
    return _Rank(replace(run, build=replace(run.build, dtype=torch.float32)), ranks).run([pack])


def _without_balancing(config: MindVLConfig) -> MindVLConfig:
    """The model without the load balancing loss, which depends on the whole pack."""
    experts = config.language.experts
    if experts is None:
        return config
    return replace(config, language=replace(config.language, experts=replace(experts, aux_loss_weight=0.0)))


def _pack(config: RunConfig, model_config: MindVLConfig) -> Batch:
    """The pack of the first step with most samples."""
    with Loader(
        config.data,
        global_batch_size=_PACKS,
        position_kind=model_config.position_kind,
        vocab_size=model_config.language.vocab_size,
    ) as loader:
        packs = [next(loader) for _ in range(_PACKS)]
    pack = max(packs, key=lambda pack: len(pack.samples))
    if len(pack.samples) < 2:
        raise TrainError(
            f"data: none of the first {_PACKS} packs has two samples, so there is nothing to check. "
            "Raise data.packing.seq_length."
        )
    return pack


def _relative(actual: Tensor, expected: Tensor) -> Tensor:
    """Relative differences; a loss of 0 (a sample without loss tokens) must remain 0."""
    return ((actual - expected).abs() / expected.abs().clamp(min=1e-6)).nan_to_num(math.inf)


def _differences(expected: dict[str, Tensor], actual: dict[str, Tensor], device: torch.device) -> dict[str, float]:
    """Largest difference of an element of each gradient, relative to the largest element; collective over all ranks."""
    largest = torch.stack(
        [tensor.abs().max().float() for tensor in expected.values()] or [torch.zeros((), device=device)]
    ).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    found = {}
    for name, tensor in expected.items():
        scale = max(float(tensor.abs().max()), SMALL * float(largest))
        difference = float((actual[name] - tensor).abs().max()) / scale
        found[name] = math.inf if math.isnan(difference) else difference
    return found


if __name__ == "__main__":
    run_rank(_check)
