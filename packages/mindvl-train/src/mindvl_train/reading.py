# SPDX-License-Identifier: Apache-2.0
"""What a start reads from storage: bytes of each machine, the time, and the time limit that follows.

A simulation from the configuration alone, for the dry run and for the timeout of the process groups; no file is opened.
Every rank reads the shards of the weights that it holds, and its slices of the optimizer state when it resumes. Ranks of
one machine that need the same bytes read them once, through the file cache of the machine. Machines read at the same
time, each up to its own bandwidth, all together up to that of the storage, which is shared equally.
"""

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from mindvl_model.counts import count_parameters, layers_of, mtp_layer
from mindvl_train.faults.watchdog import outlasting
from mindvl_train.resolved_run import ResolvedRun

FACTOR = 4  # collectives wait this many times longer than a start is expected to read
RANKS_PER_MACHINE = 8


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Bandwidth of reads in GB/s (10^9 bytes)."""

    machine_gb_s: float = 5.0  # of one machine; two 25 Gbit/s ports
    total_gb_s: float = 50.0  # of the storage, for all machines together


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What a start reads."""

    stored_bytes: float  # weights, and optimizer state when resuming, each counted once
    read_bytes: float  # by all machines
    largest_bytes: float  # by the machine that reads most
    machines: int
    seconds: float  # until the last machine has read everything
    machine_gb_s: float
    total_gb_s: float

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class _Stage:
    """Number of parameters of one pipeline stage, over all of its ranks."""

    split: int = 0  # over tensor-parallel ranks; norms and routers, which are not split, are counted here
    whole: int = 0  # vision encoder and projector if images are spread
    experts: int = 0

    @property
    def total(self) -> int:
        return self.split + self.whole + self.experts


def reads_of(run: ResolvedRun, *, resumes: bool, ranks_per_machine: int = RANKS_PER_MACHINE) -> Reads:
    """Simulate what the processes of a run read at its start.

    Args:
        resumes: Whether the optimizer state is read too.
        ranks_per_machine: Processes of one machine.
    """
    storage = Storage()
    parallel, stages = run.parallel, stages_of(run)
    per_stage = run.num_processes // parallel.pp_size
    weight, state = (2, 12) if run.config.precision == "bf16" else (4, 8)  # master weights and two moments
    trained = stages if resumes else []
    by_machine = []
    for first in range(0, run.num_processes, ranks_per_machine):
        ranks = range(first, min(first + ranks_per_machine, run.num_processes))
        places = {(rank // per_stage, rank % parallel.tp_size) for rank in ranks}
        experts = {(rank // per_stage, rank % per_stage % parallel.ep_size) for rank in ranks}
        held = sum(stages[stage].split / parallel.tp_size for stage, _ in places)
        held += sum(stages[stage].whole for stage in {stage for stage, _ in places})
        held += sum(stages[stage].experts / parallel.ep_size for stage, _ in experts)
        slices = sum(trained[rank // per_stage].total / per_stage for rank in ranks) if trained else 0.0
        by_machine.append(weight * held + state * slices)
    parameters = sum(stage.total for stage in stages)
    return Reads(
        stored_bytes=parameters * (weight + (state if resumes else 0)),
        read_bytes=sum(by_machine),
        largest_bytes=max(by_machine),
        machines=len(by_machine),
        seconds=seconds_to_read(by_machine, storage),
        machine_gb_s=storage.machine_gb_s,
        total_gb_s=storage.total_gb_s,
    )


def seconds_to_read(by_machine: list[float], storage: Storage) -> float:
    """Seconds until all machines have read their bytes at the same time."""
    seconds = done = 0.0  # bytes that every machine still reading has read
    left = sorted(by_machine)
    for number, size in enumerate(left):
        rate = 1e9 * min(storage.machine_gb_s, storage.total_gb_s / (len(left) - number))
        seconds += (size - done) / rate
        done = size
    return seconds


def start_timeout(run: ResolvedRun, *, ranks_per_machine: int = RANKS_PER_MACHINE) -> timedelta:
    """Timeout of collectives: longer than the watchdog's limit, and FACTOR times longer than resuming reads.

    The first collective after the weights are read waits for the slowest machine.
    """
    reading = reads_of(run, resumes=True, ranks_per_machine=ranks_per_machine).seconds
    return max(outlasting(run.config.faults.stuck_after_s), timedelta(seconds=FACTOR * reading))


def stages_of(run: ResolvedRun) -> list[_Stage]:
    """Number of parameters of each pipeline stage."""
    config, parallel = run.model, run.parallel
    counts, layers, extra = count_parameters(config), layers_of(config.language), mtp_layer(config.language)
    stages = [_Stage() for _ in range(parallel.pp_size)]

    def add(stage: int, *, split: int = 0, whole: int = 0, experts: int = 0) -> None:
        held = stages[stage]
        stages[stage] = _Stage(held.split + split, held.whole + whole, held.experts + experts)

    pixels = counts.vision + counts.projector
    add(0, split=counts.embedding + (0 if parallel.spread_images else pixels))
    add(0, whole=pixels if parallel.spread_images else 0)
    done = 0
    for chunk, number in enumerate(run.chunk_layers):
        for layer in layers[done : done + number]:
            add(chunk % parallel.pp_size, split=layer.total - layer.experts, experts=layer.experts)
        done += number
    last = parallel.pp_size - 1
    # With several stages, the last one has a copy of the embedding if it is also the output layer or predicts tokens.
    copied = parallel.pp_size > 1 and (config.language.tie_embeddings or extra is not None)
    experts = config.language.num_mtp_layers * extra.experts if extra is not None else 0
    add(last, split=counts.head + config.language.hidden_size + copied * counts.embedding)
    add(last, split=counts.mtp - experts, experts=experts)
    return stages
