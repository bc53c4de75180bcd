# SPDX-License-Identifier: Apache-2.0
"""Judge the rehearsed ranks of a job: does it fit into memory, would it hang, does the device have its operators?

Comes after the records of all ranks; summary.py adds the figures for the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mindvl_train.layout_search.blocks import Kernels
from mindvl_train.layout_search.search import BASE_GB, USABLE
from mindvl_train.rehearsal.classes import RankClass, class_of
from mindvl_train.rehearsal.deadlocks import Deadlock, find_deadlock
from mindvl_train.rehearsal.matching import Mismatch, World, find_mismatches
from mindvl_train.rehearsal.record import RankRecord


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the rehearsed ranks of a job say about it."""

    usable_bytes: float  # of device memory, without fragmentation of the allocator
    base_bytes: float  # of them for the device context, kernels and buffers of collectives
    tightest: int  # rank with the highest peak
    peak_bytes: float  # of the tensors of this rank
    mismatches: tuple[Mismatch, ...]
    deadlock: Deadlock | None
    missing: dict[str, str]  # operator that the device library lacks: a source line
    unequal: tuple[str, ...]  # ranks of one class whose rehearsals differ
    num_messages: int  # that were compared
    num_ranks: int

    @property
    def margin_bytes(self) -> float:
        """Bytes that stay free on the tightest rank; negative if the job does not fit."""
        return self.usable_bytes - self.base_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the job fits into memory."""
        return self.margin_bytes >= 0

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the job must not be started; empty if it can."""
        found = []
        if not self.fits:
            found.append(
                f"rank {self.tightest} needs {self.peak_bytes / 1e9:.2f} GB for tensors and {self.base_bytes / 1e9:.1f} GB "
                f"for the device context, but {self.usable_bytes / 1e9:.1f} GB are usable."
            )
        found += [f"would hang or fail: {mismatch}" for mismatch in self.mismatches]
        found += [f"would hang: {self.deadlock}"] if self.deadlock is not None else []
        found += [
            f"{name}: the device library has no such operator; used at {at}." for name, at in self.missing.items()
        ]
        return (*found,)

    @property
    def is_ok(self) -> bool:
        """Whether nothing speaks against starting the job."""
        return not self.reasons

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        room = f"rank {self.tightest} needs the most memory, {(self.peak_bytes + self.base_bytes) / 1e9:.1f} GB of "
        room += f"{self.usable_bytes / 1e9:.1f} GB usable, {abs(self.margin_bytes) / 1e9:.1f} GB "
        room += "free" if self.fits else "too much"
        if self.mismatches or self.deadlock is not None:
            messages = "its messages would make it hang"
        elif self.num_ranks == 1:
            messages = "one rank was rehearsed, so no messages were compared"
        else:
            messages = (
                f"the {self.num_messages:,} messages of {self.num_ranks} rehearsed ranks match without a deadlock"
            )
        lacking = f"; the device library lacks {', '.join(self.missing)}" if self.missing else ""
        return f"{'fits' if self.fits else 'does not fit'}: {room}; {messages}{lacking}."


def judge(
    records: Sequence[RankRecord], classes: Sequence[RankClass], *, memory_bytes: float, kind: Kernels
) -> Verdict:
    """Judge the ranks of one job.

    Args:
        memory_bytes: Memory of a device; its usable part is that of the layout search.
        kind: Kernels of the device, for the bytes that are not tensors.
    """
    by_rank = {record.rank: record for record in records}
    world = World(by_rank, classes)
    mismatches = find_mismatches(world)
    tightest = max(records, key=peak_bytes)
    return Verdict(
        usable_bytes=USABLE * memory_bytes,
        base_bytes=1e9 * BASE_GB[kind],
        tightest=tightest.rank,
        peak_bytes=peak_bytes(tightest),
        mismatches=tuple(mismatches),
        deadlock=None if mismatches else find_deadlock(world),
        missing={name: one.source for record in records for name, one in record.missing.items()},
        unequal=tuple(_unequal(by_rank, classes)),
        num_messages=sum(len(record.messages) for record in records),
        num_ranks=len(records),
    )


def peak_bytes(record: RankRecord) -> int:
    """Highest device memory of a rank: in the last step, or in an earlier phase."""
    return max(record.peak.num_bytes, *(phase.peak_bytes for phase in record.phases), 0)


def _unequal(by_rank: dict[int, RankRecord], classes: Sequence[RankClass]) -> list[str]:
    """One sentence for each rehearsed rank that differs from the first of its class."""
    found, first_of = [], dict[int, RankRecord]()
    for rank, record in sorted(by_rank.items()):
        first = first_of.setdefault(class_of(classes, rank).representative, record)
        if first is record:
            continue
        differences = []
        if peak_bytes(first) != peak_bytes(record):
            more = peak_bytes(record) - peak_bytes(first)
            differences.append(f"its peak is {abs(more) / 1e6:.2f} MB {'higher' if more > 0 else 'lower'}")
        if len(first.messages) != len(record.messages):
            differences.append(f"it has {len(record.messages):,} messages, not {len(first.messages):,}")
        if differences:
            found.append(f"rank {rank} differs from rank {first.rank} of its class: {' and '.join(differences)}")
    return found
