# SPDX-License-Identifier: Apache-2.0
"""Estimated step time: operations / (peak * efficiency), bytes / bandwidth, and the pipeline bubble.

Comes after stages.py, before search.py. docs/design/layout-search.md compares estimates with measurements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindvl_model.parallel_config import ParallelConfig, RecomputeConfig, carried_features
from mindvl_train.devices import Device
from mindvl_train.layout_search.blocks import Block, Kernels, Setting
from mindvl_train.layout_search.memory import Ledger, offloaded_layers
from mindvl_train.layout_search.stages import Chunk

# Fraction of the peak in large matrix products; with it the estimate for mindvl-8b on 910B2 is near the 40 % MFU of the
# paper.
MATMUL_EFFICIENCY = 0.58
ATTENTION_OF_MATMUL = 0.6  # efficiency of attention relative to matrix products
_BANDWIDTH_EFFICIENCY = 0.75  # of memory and links
_OVERLAP = 0.8  # fraction of a forward or backward pass that can overlap with data-parallel communication
_NEVER_HIDDEN = 0.1  # fraction of that communication that is always exposed: first and last bucket
_UPDATE_BYTES = 42  # bytes read and written per parameter: gradient, norm and scaling, master weight, moments, weight
_HOST_BYTES = 16  # bytes between device and host per parameter with offloaded moments
_HOST_GB_S = 25.0  # bandwidth between device and host, PCIe 4.0 x16


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices of a cluster with their efficiency."""

    device: Device
    num_devices: int
    per_server: int = 8
    memory_gb: float | None = None  # None: from the device table
    link_gb_s: float | None = None  # None: from the device table
    network_gb_s: float | None = None  # None: from the device table
    efficiency: float = MATMUL_EFFICIENCY
    visual_imbalance: float = 0.0183  # docs/design/evidence/loader.md: lock-step imbalance at 8,192 tokens

    @property
    def kernels(self) -> Kernels:
        """The operator backend."""
        return "npu" if self.device.name.startswith("910") else "cuda"

    @property
    def peak(self) -> float:
        """Peak operations per second."""
        return self.device.bf16_tflops * 1e12

    @property
    def link(self) -> float:
        """Bytes per second inside a server."""
        return 1e9 * _BANDWIDTH_EFFICIENCY * (self.link_gb_s or self.device.link_gb_s)

    @property
    def network(self) -> float:
        """Bytes per second between servers."""
        return 1e9 * _BANDWIDTH_EFFICIENCY * (self.network_gb_s or self.device.network_gb_s)

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second of device memory."""
        return 1e9 * _BANDWIDTH_EFFICIENCY * self.device.memory_gb_s

    def sending_s(self, sent: float, size: int, stride: int) -> float:
        """Time of a ring or all-to-all of `size` ranks with distance `stride`, in which each rank sends these bytes."""
        if size <= 1 or not sent:
            return 0.0
        inside = max(1, min(size, self.per_server // stride))
        if inside == size:
            return sent / self.link
        # Traffic between servers uses the network ports of all ranks of a server.
        outside = sent * (size - inside) / (size - 1)
        return sent * (inside - 1) / (size - 1) / self.link + outside / self.network

    def reducing_s(self, sent: float, size: int, stride: int) -> float:
        """Time of a hierarchical reduction: inside each server first, then between servers."""
        if size <= 1 or not sent:
            return 0.0
        inside = max(1, min(size, self.per_server // stride))
        between = 0.0 if inside == size else sent / inside / self.network
        return (sent / self.link if inside > 1 else 0.0) + between


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step on the slowest pipeline rank by category."""

    matmul: float
    attention: float
    elementwise: float
    recompute: float
    offload: float  # copies of activations to the host and back that computation does not hide
    tp: float  # collectives of tensor and sequence parallelism
    cp: float
    ep: float
    pp: float  # sends of activations between stages
    bubble: float  # pipeline bubble
    dp: float  # exposed gradient reduction and parameter gathering
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())

    def as_dict(self) -> dict[str, float]:
        """Categories and total as JSON values."""
        return vars(self) | {"total": self.total}


class Cost(NamedTuple):
    """Seconds of one pack on one rank."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recompute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    offload: float = 0.0
    forward: float = 0.0  # part of the other fields that is in the forward pass

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return sum(self[:8])


class Clock:
    """Times of model chunks on one machine, cached."""

    def __init__(self, machine: Machine, setting: Setting) -> None:
        self.machine, self.setting = machine, setting
        self._blocks: dict[int, tuple[Block, Cost]] = {}
        self._chunks: dict[tuple[object, ...], Cost] = {}

    def pack_s(self, block: Block) -> float:
        """Seconds of forward and backward of one pack."""
        return self.cost(block).total

    def cost(self, block: Block) -> Cost:
        """Seconds of one pack by category."""
        found = self._blocks.get(id(block))
        if found is None:
            found = self._blocks[id(block)] = block, self._cost(block)
        return found[1]

    def chunk(self, chunk: Chunk, recompute: RecomputeConfig) -> Cost:
        """Seconds of one pack in a chunk."""
        key = (chunk.key, recompute)
        if key not in self._chunks:
            costs = [(self.cost(block), count) for block, count in chunk.runs]
            total = [sum(count * cost[index] for cost, count in costs) for index in range(len(Cost._fields))]
            total[Cost._fields.index("recompute")] += self._recompute_s(chunk, recompute)
            cost = Cost(*total)
            self._chunks[key] = cost._replace(offload=_offload_s(chunk, recompute, cost))
        return self._chunks[key]

    def _recompute_s(self, chunk: Chunk, recompute: RecomputeConfig) -> float:
        """Seconds of additional forward passes of recomputed layers."""
        if recompute.kind != "full":
            return 0.0
        left, seconds = chunk.num_layers if recompute.layers is None else recompute.layers, 0.0
        for block, count in chunk.layers:
            again = min(left, count)
            left -= again
            seconds += again * self.cost(block).forward
        vision_layers = [
            (block, count) for block, count in chunk.before if block.name == "vision layer" and block.trained
        ]
        return seconds + sum(count * self.cost(block).forward for block, count in vision_layers)

    def _cost(self, block: Block) -> Cost:
        machine, setting = self.machine, self.setting
        matmul_rate = machine.peak * machine.efficiency
        attention_rate = matmul_rate * ATTENTION_OF_MATMUL
        back = 1.0 if block.inputs else 0.0
        tp = machine.sending_s(block.sent.tp, setting.tp_size, 1)
        cp = machine.sending_s(block.sent.cp, setting.cp_size, setting.tp_size)
        ep = machine.sending_s(block.sent.ep, setting.ep_size, 1)
        # Backward gathers the input of the next matrix again for its weight gradients: half the traffic.
        regathered = 0.5 if block.weights and block.part == "language" else 0.0
        uneven = 1 + machine.visual_imbalance if block.part == "vision" else 1.0
        attention = block.attention / attention_rate
        elementwise = uneven * block.elementwise / machine.memory_bandwidth
        return Cost(
            matmul=uneven * (block.matmul + block.backward_matmul) / matmul_rate,
            attention=uneven * (attention + block.backward_attention / attention_rate),
            elementwise=elementwise * (1 + 2 * max(back, float(block.weights))),
            recompute=(attention if setting.selective and back else 0.0) + block.repeated / matmul_rate,
            tp=tp * (1 + back * (1 + regathered)),
            cp=cp * (1 + back),
            ep=ep * (1 + back),
            forward=uneven * (block.matmul / matmul_rate + attention) + elementwise + tp + cp + ep,
        )


def _offload_s(chunk: Chunk, recompute: RecomputeConfig, cost: Cost) -> float:
    """Seconds of copies in forward and in backward that are longer than the computation of the chunk."""
    copied = sum(count * block.kept for block, count in offloaded_layers(chunk, recompute)) / (1e9 * _HOST_GB_S)
    return max(0.0, copied - cost.forward) + max(0.0, copied - (cost.total - cost.forward))


def step_time(
    clock: Clock,
    ledger: Ledger,
    parallel: ParallelConfig,
    recompute: RecomputeConfig,
    chunks: Sequence[Chunk],
    *,
    dp_size: int,
    num_microbatches: int,
    offload: bool = False,
) -> StepTime:
    """Estimate the seconds of one step.

    Args:
        ledger: Parameter counts of the same chunks.
    """
    machine, setting, size = clock.machine, clock.setting, parallel.pp_size
    ranks = []
    for rank in range(size):
        costs = [clock.chunk(chunk, recompute) for chunk in chunks[rank::size]]
        ranks.append(costs[0] if len(costs) == 1 else Cost(*(sum(values) for values in zip(*costs, strict=True))))
    message = setting.pack_bytes * (1 + carried_features(setting.model, parallel))
    # Sends overlap with computation in the interleaved schedule only.
    is_exposed = size > 1 and parallel.virtual_stages == 1
    sent = 2 * machine.sending_s(message, 2, machine.num_devices // size) if is_exposed else 0.0
    slots = [cost.total + sent for cost in ranks]
    slowest = max(range(size), key=lambda rank: slots[rank])
    worst = ranks[slowest]
    dp, optimizer = max(
        (
            _after(clock, ledger, parallel, chunks[rank::size], ranks[rank], dp_size=dp_size, offload=offload)
            for rank in {0, slowest, size - 1}
        ),
        key=sum,
    )
    packs = num_microbatches
    return StepTime(
        matmul=packs * worst.matmul,
        attention=packs * worst.attention,
        elementwise=packs * worst.elementwise,
        recompute=packs * worst.recompute,
        offload=packs * worst.offload,
        tp=packs * worst.tp,
        cp=packs * worst.cp,
        ep=packs * worst.ep,
        pp=packs * sent,
        bubble=(sum(slots) - slots[slowest]) / parallel.virtual_stages,
        dp=dp,
        optimizer=optimizer,
    )


def _after(
    clock: Clock,
    ledger: Ledger,
    parallel: ParallelConfig,
    own: Sequence[Chunk],
    cost: Cost,
    *,
    dp_size: int,
    offload: bool,
) -> tuple[float, float]:
    """(exposed gradient reduction and parameter gathering, optimizer update) of one pipeline rank, in seconds."""
    machine, setting = clock.machine, clock.setting
    counts = [ledger.counts(chunk) for chunk in own]
    copies = dp_size * parallel.cp_size
    expert_copies = max(1, copies * parallel.tp_size // parallel.ep_size)
    reduced = gathered = update = 0.0
    for count, size, stride in (
        (sum(one.trained_dense for one in counts), copies, parallel.tp_size),
        (sum(one.trained_experts for one in counts), expert_copies, parallel.ep_size),
    ):
        reduced += machine.reducing_s(4 * count * setting.ring(size), size, stride)
        gathered += machine.reducing_s(setting.wide * count * setting.ring(size), size, stride)
        update += count / size * _UPDATE_BYTES / machine.memory_bandwidth
        update += count * 4 / machine.memory_bandwidth  # zeroing the gradient buffer
        update += count / size * _HOST_BYTES / (1e9 * _HOST_GB_S) if offload else 0.0
    if not parallel.overlap:
        return reduced + gathered, update
    exposed = max(_NEVER_HIDDEN * reduced, reduced - _OVERLAP * (cost.total - cost.forward))
    exposed += max(_NEVER_HIDDEN * gathered, gathered - _OVERLAP * cost.forward)
    return exposed, update
