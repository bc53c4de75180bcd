# SPDX-License-Identifier: Apache-2.0
"""Seconds of one step: operations over peak and efficiency, bytes over bandwidths, the pipeline's bubble.

Comes after stages.py, before search.py. An estimate, not a measurement: docs/design/layout-search.md says what was checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindvl_model.parallel_config import ParallelConfig, RecomputeConfig
from mindvl_train.devices import Device
from mindvl_train.layout_search.blocks import Block, Kernels, Setting
from mindvl_train.layout_search.memory import Ledger
from mindvl_train.layout_search.stages import Chunk

# Of the peak, in a layer's large matrices; with it a plan of mindvl-8b on 910B2 comes out near the 40 % of peak that
# the paper reports.
MATMUL_EFFICIENCY = 0.58
_ATTENTION_OF_MATMUL = 0.6  # efficiency of attention over that of matrices
_BANDWIDTH_EFFICIENCY = 0.75  # of memory and of links
_OVERLAP = 0.8  # share of one forward or backward behind which reduction and gathering can hide
_NEVER_HIDDEN = 0.1  # of them: the first and the last bucket
_UPDATE_BYTES = 42  # read and written for one parameter: gradient, its norm and scaling, master, moments, weight
_HOST_BYTES = 16  # that cross to the host and back for one parameter whose moments are kept there
_HOST_GB_S = 25.0  # between a device and its host, PCIe 4.0 with 16 lanes


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device, how many stand in one server, and what can be got out of them."""

    device: Device
    num_devices: int
    per_server: int = 8
    memory_gb: float | None = None  # in place of the table's
    link_gb_s: float | None = None  # in place of the table's
    network_gb_s: float | None = None  # in place of the table's
    efficiency: float = MATMUL_EFFICIENCY
    visual_imbalance: float = 0.0183  # docs/design/evidence/loader.md: lock-step imbalance at 8,192 tokens

    @property
    def kernels(self) -> Kernels:
        """Whose operators run."""
        return "npu" if self.device.name.startswith("910") else "cuda"

    @property
    def peak(self) -> float:
        """Operations a second."""
        return self.device.bf16_tflops * 1e12

    @property
    def link(self) -> float:
        """Bytes a second inside a server."""
        return 1e9 * _BANDWIDTH_EFFICIENCY * (self.link_gb_s or self.device.link_gb_s)

    @property
    def network(self) -> float:
        """Bytes a second between servers."""
        return 1e9 * _BANDWIDTH_EFFICIENCY * (self.network_gb_s or self.device.network_gb_s)

    @property
    def memory_bandwidth(self) -> float:
        """Bytes a second of the device's own memory."""
        return 1e9 * _BANDWIDTH_EFFICIENCY * self.device.memory_gb_s

    def sending_s(self, sent: float, size: int, stride: int) -> float:
        """Time to send that many bytes to `size` ranks that lie `stride` apart, in a ring or to all."""
        if size <= 1 or not sent:
            return 0.0
        inside = max(1, min(size, self.per_server // stride))
        if inside == size:
            return sent / self.link
        # What leaves the server goes out through the ports of all its members.
        outside = sent * (size - inside) / (size - 1)
        return sent * (inside - 1) / (size - 1) / self.link + outside / self.network

    def reducing_s(self, sent: float, size: int, stride: int) -> float:
        """Time of a ring in which servers reduce among themselves first, so that only their sums travel."""
        if size <= 1 or not sent:
            return 0.0
        inside = max(1, min(size, self.per_server // stride))
        between = 0.0 if inside == size else sent / inside / self.network
        return (sent / self.link if inside > 1 else 0.0) + between


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step on the slowest pipeline rank, by what they go to."""

    matmul: float
    attention: float
    elementwise: float
    recompute: float
    tp: float  # collectives of tensor and sequence parallel
    cp: float
    ep: float
    pp: float  # sending activations on
    bubble: float  # filling and draining the pipeline
    dp: float  # reduction and gathering that no computation hides
    optimizer: float

    @property
    def total(self) -> float:
        """The step."""
        return sum(vars(self).values())

    def as_dict(self) -> dict[str, float]:
        """Parts and total, for JSON."""
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
    forward: float = 0.0  # of the others, what falls into forward

    @property
    def total(self) -> float:
        """Forward and backward."""
        return sum(self[:7])


class Clock:
    """Times of the chunks of one setting on one machine; each is counted once."""

    def __init__(self, machine: Machine, setting: Setting) -> None:
        self.machine, self.setting = machine, setting
        self._blocks: dict[int, tuple[Block, Cost]] = {}
        self._chunks: dict[tuple[object, ...], Cost] = {}

    def pack_s(self, block: Block) -> float:
        """Forward and backward of one pack."""
        return self.cost(block).total

    def cost(self, block: Block) -> Cost:
        """By what it goes to."""
        found = self._blocks.get(id(block))
        if found is None:
            found = self._blocks[id(block)] = block, self._cost(block)
        return found[1]

    def chunk(self, chunk: Chunk, recompute: RecomputeConfig) -> Cost:
        """One pack through a chunk."""
        key = (chunk.key, recompute.kind, recompute.layers)
        if key not in self._chunks:
            costs = [(self.cost(block), count) for block, count in chunk.runs]
            total = [sum(count * cost[place] for cost, count in costs) for place in range(len(Cost._fields))]
            total[Cost._fields.index("recompute")] += self._again(chunk, recompute)
            self._chunks[key] = Cost(*total)
        return self._chunks[key]

    def _again(self, chunk: Chunk, recompute: RecomputeConfig) -> float:
        """Forward passes that recomputation of whole layers adds."""
        if recompute.kind != "full":
            return 0.0
        left, seconds = chunk.num_layers if recompute.layers is None else recompute.layers, 0.0
        for block, count in chunk.layers:
            again = min(left, count)
            left -= again
            seconds += again * self.cost(block).forward
        if recompute.layers is None:
            vision_encoder = [
                (block, count) for block, count in chunk.before if block.name == "vision layer" and block.trained
            ]
            seconds += sum(count * self.cost(block).forward for block, count in vision_encoder)
        return seconds

    def _cost(self, block: Block) -> Cost:
        machine, setting = self.machine, self.setting
        matmul_rate = machine.peak * machine.efficiency
        attention_rate = matmul_rate * _ATTENTION_OF_MATMUL
        back = 1.0 if block.inputs else 0.0
        tp = machine.sending_s(block.sent.tp, setting.tp_size, 1)
        cp = machine.sending_s(block.sent.cp, setting.cp_size, setting.tp_size)
        ep = machine.sending_s(block.sent.ep, setting.ep_size, 1)
        # Backward gathers the input of the next matrix again for the gradient of its weights: half as much once more.
        regathered = 0.5 if block.weights and block.part == "language" else 0.0
        uneven = 1 + machine.visual_imbalance if block.part == "vision" else 1.0
        attention = block.attention / attention_rate
        elementwise = uneven * block.elementwise / machine.memory_bandwidth
        return Cost(
            matmul=uneven * (block.matmul + block.backward_matmul) / matmul_rate,
            attention=uneven * (attention + block.backward_attention / attention_rate),
            elementwise=elementwise * (1 + 2 * max(back, float(block.weights))),
            recompute=attention if setting.selective and back else 0.0,
            tp=tp * (1 + back * (1 + regathered)),
            cp=cp * (1 + back),
            ep=ep * (1 + back),
            forward=uneven * (block.matmul / matmul_rate + attention) + elementwise + tp + cp + ep,
        )


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
    """Seconds of one step of this layout; `ledger` counts parameters of the same chunks."""
    machine, setting, size = clock.machine, clock.setting, parallel.pp_size
    ranks = []
    for rank in range(size):
        costs = [clock.chunk(chunk, recompute) for chunk in chunks[rank::size]]
        ranks.append(costs[0] if len(costs) == 1 else Cost(*(sum(values) for values in zip(*costs, strict=True))))
    boundary = setting.wide * setting.sliced * setting.model.language.hidden_size
    # Interleaved stages send while they compute; otherwise each pack waits for what it sends forward and back.
    is_exposed = size > 1 and parallel.virtual_stages == 1
    sent = 2 * machine.sending_s(boundary, 2, machine.num_devices // size) if is_exposed else 0.0
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
    """(exposed reduction and gathering, update) of one pipeline rank."""
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
        update += count * 4 / machine.memory_bandwidth  # the buffer is emptied
        update += count / size * _HOST_BYTES / (1e9 * _HOST_GB_S) if offload else 0.0
    if not parallel.overlap:
        return reduced + gathered, update
    exposed = max(_NEVER_HIDDEN * reduced, reduced - _OVERLAP * (cost.total - cost.forward))
    exposed += max(_NEVER_HIDDEN * gathered, gathered - _OVERLAP * cost.forward)
    return exposed, update
