# SPDX-License-Identifier: Apache-2.0
"""Compare parallel layouts: loss and gradients of a model by global name, from processes over gloo.

Uses megatron/one_step.py. One rank runs `python -m mindvl_model.testing.layouts JOB` with the environment of a launcher.
"""

import pickle
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mindvl_model.accelerator import set_up_device
from mindvl_model.adapters import LoRAConfig
from mindvl_model.config import MindVLConfig
from mindvl_model.parallel_config import BuildConfig, ParallelConfig, RecomputeConfig
from mindvl_model.parameters import PARTS, Part, set_trainable
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.ranks import run_ranks

Piece = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]  # name, global shape, global offset, content
_ONE_PROCESS = BuildConfig()


@dataclass(frozen=True)
class Outcome:
    """Results of one step."""

    loss_sum: float
    gradients: dict[str, Tensor]
    load: dict[int, Tensor]  # tokens per expert [E], by layer
    bias: dict[int, Tensor]  # routing bias [E] after the update, by layer
    mtp_loss: float
    choices: dict[tuple[int, int], Tensor]  # selected experts [T, K], by layer and pack


@dataclass(frozen=True, kw_only=True)
class Job:
    """One step with one parallel layout."""

    config: MindVLConfig
    packs: Sequence[dict[str, Any]]
    weights: dict[str, Tensor]
    build_config: BuildConfig
    dp_size: int = 1
    trainable: Collection[Part] = PARTS
    lora: LoRAConfig | None = None  # adapters on the trainable parts

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.dp_size * self.build_config.parallel.model_parallel_size


def in_one_process(
    config: MindVLConfig,
    packs: Sequence[dict[str, Any]],
    seed: int = 0,
    *,
    trainable: Collection[Part] = PARTS,
    lora: LoRAConfig | None = None,
    build_config: BuildConfig = _ONE_PROCESS,
) -> tuple[Outcome, Any]:
    """Run a step with random weights in this process; returns the results, and the weights for run_jobs."""
    from mindvl_model.megatron.one_step import pieces, step
    from mindvl_model.model import MindVLModel
    from mindvl_model.testing.tiny import randomize

    model = MindVLModel(config, build_config)
    _prepare(model, config, trainable, lora)
    randomize(model, seed)
    weights = join([pieces(model)])
    _quantize(model, config, lora)
    return _merge([step([model], packs)]), weights


def run_jobs(jobs: Sequence[Job], directory: Path) -> list[Outcome]:
    """Run jobs of the same world size in processes that are started once.

    Raises:
        AssertionError: A process failed, or the gradients of replicas of a tensor differ.
    """
    (world,) = {job.world_size for job in jobs}
    file = directory / "jobs"
    file.write_bytes(pickle.dumps(list(jobs)))
    run_ranks(["-m", __spec__.name, str(file)], world, timeout_s=120 + 30 * len(jobs))
    results = [pickle.loads(Path(f"{file}.{rank}").read_bytes()) for rank in range(world)]
    return [_merge(of_ranks) for of_ranks in zip(*results, strict=True)]


@dataclass(frozen=True)
class Case:
    """A model with a parallel layout."""

    config: MindVLConfig
    parallel: dict[str, Any] = field(default_factory=dict)
    recompute: Literal["none", "selective", "full"] = "none"
    dp_size: int = 1
    trainable: tuple[Part, ...] = PARTS
    lora: LoRAConfig | None = None


class Layouts:
    """Outcomes of cases in one process and in several; nothing is computed twice.

    Args:
        directory: Where processes leave their results.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._alone: dict[Any, tuple[Outcome, Any]] = {}
        self._together: dict[str, Outcome] = {}

    def alone(
        self, config: MindVLConfig, trainable: tuple[Part, ...] = PARTS, lora: LoRAConfig | None = None
    ) -> tuple[Outcome, Any]:
        """Results and weights of one process."""
        key = config, trainable, lora
        if key not in self._alone:
            self._alone[key] = in_one_process(config, packs_of(config), trainable=trainable, lora=lora)
        return self._alone[key]

    def together(self, cases: dict[str, Case]) -> dict[str, Outcome]:
        """Results of all cases of the same number of processes, which are started once."""
        if not cases.keys() & self._together.keys():
            jobs = [
                Job(
                    config=case.config,
                    packs=packs_of(case.config),
                    weights=self.alone(case.config, case.trainable, case.lora)[1],
                    build_config=BuildConfig(
                        parallel=ParallelConfig(**case.parallel),
                        recompute=RecomputeConfig(kind=case.recompute),
                        seq_length=max(len(pack["input_ids"]) for pack in packs_of(case.config)),
                    ),
                    dp_size=case.dp_size,
                    trainable=case.trainable,
                    lora=case.lora,
                )
                for case in cases.values()
            ]
            self._together.update(zip(cases, run_jobs(jobs, self._directory), strict=True))
        return self._together

    def pair(self, cases: dict[str, Case], name: str) -> tuple[Outcome, Outcome]:
        """Results of one of the cases in its layout and in one process."""
        case = cases[name]
        return self.together(cases)[name], self.alone(case.config, case.trainable, case.lora)[0]


def packs_of(config: MindVLConfig) -> list[dict[str, Any]]:
    """Images of different sizes, text, a video, and text at the end; no layout divides the lengths evenly."""
    media: list[dict[str, Any]] = [
        {"grids": [(1, 4, 4), (1, 8, 6), (1, 2, 2)], "num_text": 4},
        {"num_text": 24},
        {"videos": [(3, 4, 4)], "num_text": 9},
        {"num_text": 33},
    ]
    packs = []
    for seed, first in enumerate(media):
        segments = [random_segment(config, seed=seed, **first), random_segment(config, num_text=11, seed=9 + seed)]
        pack = pack_segments(segments, padding=3, pad_id=config.tokens.pad)
        if len(pack["input_ids"]) % 2 == 0:
            pack = pack_segments(segments, padding=4, pad_id=config.tokens.pad)
        steps = torch.arange(len(pack["input_ids"]))
        pack["position_ids"] = torch.stack((steps // 2, steps, 3 * steps % 7))  # three axes that are not alike
        packs.append(pack)
    return packs


def join(parts: Sequence[Sequence[Piece]]) -> dict[str, Tensor]:
    """Assemble whole tensors from the shards of all ranks; replicas must be equal up to rounding."""
    whole: dict[str, Tensor] = {}
    for name, shape, offset, content in chain(*parts):
        target = whole.setdefault(name, torch.full(shape, torch.nan))[_slices(offset, content)]
        if not target.isnan().any():
            difference = (content - target).abs().max()
            assert difference <= 1e-5 * target.abs().max() + 1e-8, f"{name}: ranks differ by {difference}"
        target.copy_(content)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def _merge(results: Sequence[dict[str, Any]]) -> Outcome:
    return Outcome(
        loss_sum=sum(result["loss_sum"] for result in results),
        gradients=join([result["gradients"] for result in results]),
        load={layer: load for result in results for layer, load in result["load"].items()},
        bias={layer: bias for result in results for layer, bias in result["bias"].items()},
        mtp_loss=sum(result["mtp_loss"] for result in results),
        choices={
            (layer, index * result["dp_size"] + result["dp_rank"]): experts
            for result in results
            for layer, packs in result["choices"].items()
            for index, experts in enumerate(packs)
        },
    )


def _prepare(model: Any, config: MindVLConfig, trainable: Collection[Part], lora: LoRAConfig | None) -> None:
    """Choose what is trained: parts, or adapters of these parts."""
    set_trainable(model, trainable)
    if lora is not None:
        from mindvl_model.megatron.adapters import add_adapters

        add_adapters(model, config, lora, trainable)


def _quantize(model: Any, config: MindVLConfig, lora: LoRAConfig | None) -> None:
    if lora is not None:
        from mindvl_model.megatron.quantized import quantize_base

        quantize_base(model, config, lora)


def _slices(offset: tuple[int, ...], content: Tensor) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offset, content.shape, strict=True))


def _run(file: Path) -> None:
    set_up_device()
    from mindvl_model.megatron.one_step import launched_process, parallel_groups, pieces, step
    from mindvl_model.megatron.stages import build_stages

    # The file was pickled with the classes of the imported module; make pickle find those of __main__.
    sys.modules[__spec__.name] = sys.modules["__main__"]
    results = []
    with launched_process() as rank:
        for job in pickle.loads(file.read_bytes()):
            with parallel_groups(job.build_config.parallel) as state:
                models = build_stages(job.config, job.build_config)
                for model in models:
                    _prepare(model, job.config, job.trainable, job.lora)
                for name, _, start, content in (piece for model in models for piece in pieces(model)):
                    content.copy_(job.weights[name][_slices(start, content)])
                for model in models:
                    _quantize(model, job.config, job.lora)
                result = step(models, job.packs[state.dp_rank :: state.dp_size])
                if state.tp_rank:
                    result |= {"loss_sum": 0.0, "mtp_loss": 0.0}  # counted on tp rank 0 only
                results.append(result)
    Path(f"{file}.{rank}").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
