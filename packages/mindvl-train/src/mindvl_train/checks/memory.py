# SPDX-License-Identifier: Apache-2.0
"""Rehearsed peaks beside measured peaks of the same steps on this machine's CPU.

A measurement records every allocation of PyTorch's allocator in real processes (layout_search/measure.py), a rehearsal
counts the storages of fake tensors in one process for each rank. The jobs are small models of every kind of layout. In
both, every expert receives the same number of rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from mindvl_data import DataConfig, PackingConfig, SourceConfig
from mindvl_model import LanguagePreset, VisionConfig
from mindvl_model.parallel_config import ParallelConfig, RecomputeConfig
from mindvl_model.sizes import MEASURED_DECODERS
from mindvl_train.config import ModelSection, Precision, RunConfig, ScheduleConfig
from mindvl_train.layout_search.measure import Job, measure, predict
from mindvl_train.layout_search.packs import Pack
from mindvl_train.rehearsal.job import TOKENS
from mindvl_train.rehearsal.rehearse import rehearse
from mindvl_train.resolved_run import resolve_run

_VISION = VisionConfig(hidden_size=128, num_layers=4, num_heads=4, ffn_hidden_size=344, full_attention_layers=(3,))
_LARGE_VISION = replace(_VISION, hidden_size=256, num_heads=8, ffn_hidden_size=688)
_DENSE, _LARGE, _MOE, _LATENT = (MEASURED_DECODERS[name] for name in ("dense", "large", "experts", "latent"))
_PACK = Pack(segments=(256, 218, 504, 46), grids=((1, 16, 24), (1, 8, 8)))


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """One job of the comparison."""

    name: str
    language: LanguagePreset
    vision: VisionConfig = _VISION
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    precision: Precision = "fp32"
    processes: int = 1
    packs: int = 1


CASES: tuple[MemoryCase, ...] = (
    MemoryCase(name="Qwen3, one process", language=_DENSE),
    MemoryCase(name="Qwen3, one process, bf16", language=_DENSE, precision="bf16"),
    MemoryCase(
        name="Qwen3, one process, bf16, all layers recomputed",
        language=_DENSE,
        precision="bf16",
        recompute=RecomputeConfig(kind="full"),
    ),
    MemoryCase(name="Qwen3 large, one process", language=_LARGE, vision=_LARGE_VISION),
    MemoryCase(name="Qwen3-MoE, one process, bf16", language=_MOE, precision="bf16"),
    MemoryCase(name="DeepSeek-V3, one process", language=_LATENT),
    MemoryCase(name="Qwen3, tp 2", language=_DENSE, parallel=ParallelConfig(tp_size=2), processes=2, packs=2),
    MemoryCase(name="Qwen3, cp 2", language=_DENSE, parallel=ParallelConfig(cp_size=2), processes=2),
    MemoryCase(name="Qwen3, pp 2", language=_DENSE, parallel=ParallelConfig(pp_size=2), processes=2, packs=4),
    MemoryCase(name="Qwen3-MoE, ep 2 dp 2", language=_MOE, parallel=ParallelConfig(ep_size=2), processes=2, packs=2),
    MemoryCase(
        name="DeepSeek-V3, tp 2 ep 2", language=_LATENT, parallel=ParallelConfig(tp_size=2, ep_size=2), processes=2
    ),
)


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Peak bytes of one rank."""

    name: str
    rank: int
    measured: float
    rehearsed: float
    estimated: float  # by the layout search

    @property
    def difference(self) -> float:
        """Rehearsed relative to measured."""
        return self.rehearsed / self.measured - 1


def compare_memory(cases: tuple[MemoryCase, ...] = CASES) -> Iterator[MemoryRow]:
    """Measure, rehearse and estimate every rank of each case.

    Raises:
        TrainError: A process failed.
    """
    for case in cases:
        config = _config(case)
        run = resolve_run(config, case.processes)
        job = Job(run=replace(run, model=replace(run.model, tokens=TOKENS)), pack=_PACK, even_experts=True)
        measured = measure(job)
        estimated = predict(job, "cpu")
        for rank in range(case.processes):
            record = rehearse(config, recipe=case.name, device="cpu", world_size=case.processes, rank=rank, pack=_PACK)
            yield MemoryRow(
                name=case.name,
                rank=rank,
                measured=measured[rank].total,
                rehearsed=record.peak.num_bytes,
                estimated=estimated[rank].total,
            )


def _config(case: MemoryCase) -> RunConfig:
    return RunConfig(
        phase="sft",
        out=Path("run"),
        data=DataConfig(
            sources=(SourceConfig(name="none", path="none"),),
            tokenizer=Path("none"),
            packing=PackingConfig(seq_length=_PACK.tokens),
        ),
        model=ModelSection(vision=case.vision, language=case.language),
        schedule=ScheduleConfig(steps=1, peak_lr=1e-4),
        global_batch_size=case.packs,
        parallel=case.parallel,
        recompute=case.recompute,
        precision=case.precision,
    )
