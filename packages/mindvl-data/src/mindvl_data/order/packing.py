# SPDX-License-Identifier: Apache-2.0
"""Pack samples into packed sequences (packs) with two budgets, tokens and patches.

Comes after mixture and shuffle, before collate. It uses lengths only, so it runs ahead of decoding. Each pack starts
with the oldest sample of a buffer, so no sample waits for more packs than the buffer has samples. It then takes samples
whose visual density is closest to the density still needed while more than 70 % of the pack is free, and is completed
exactly: a bitset of reachable sums over the candidates closest in density, then the largest samples that still fit. A
pack whose patches come near a limit is completed by tokens and patches together (completion.py). No randomness: the packs
depend on the input only.
"""

from copy import copy
from itertools import compress
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mindvl_data.order.completion import best_subset

Item = TypeVar("Item")

_STEER_UNTIL = 0.7  # share of the pack that is left for exact completion
_STEER_CANDIDATES = 96  # oldest samples considered while steering
_SUM_CANDIDATES = 64  # samples whose sums are searched
_AGE_WEIGHT = 0.60  # penalty of the newest candidate relative to the oldest, as a density error, while steering
_SMALL_BUFFER = 32  # samples; smaller buffers have their full size from the start, larger ones start with a quarter
_PACKS_PER_SAMPLE = 16  # packs after which a buffer grows by one sample
_SUM_AGE_WEIGHT = 0.12  # penalty of the newest candidate during completion
_SLACK = 1.5  # patches that a pack may have below the average, relative to those that it may have above
_LAST_SAMPLES = 3  # average samples that are left for completion by both budgets
_SUBSET_CANDIDATES = 256  # oldest samples considered by it


class Packer(Generic[Item]):
    """A buffer of samples and the packs built from it; it uses lengths only, so it works for any kind of sample.

    Add samples until it is full, take one pack, and repeat; at the end of the data take packs until one is empty. No
    sample is split, lost or repeated, and none waits for more packs than `buffer_size`.

        packer = Packer(capacity=8192, max_patches=16_000, patches_per_token=1.4, buffer_size=256)
        for name, tokens, patches in samples:
            packer.add(name, tokens, patches)
            if packer.is_full:
                train_on(packer.next_pack())
        while pack := packer.next_pack():
            train_on(pack)

    The state is `items` and `num_packs`: the same items, added in the same order with the same lengths, give the same
    packs. The buffer starts small and grows to its size: samples that are hard to pack accumulate slowly, and a large
    buffer filled at the start would use up the short samples first.

    Args:
        capacity: Tokens per pack.
        max_patches: Patches per pack; 0 for text only. Any other cost of a sample can be used instead of patches. A
            sample with more patches shares its pack only with samples without patches.
        patches_per_token: Average patches per token of the mixture; the target of each pack.
        buffer_size: Samples to choose from; a larger buffer improves packing efficiency and lets samples wait longer.

    Attributes:
        num_packs: Packs built so far; set it when a state is restored.
    """

    def __init__(self, *, capacity: int, max_patches: int, patches_per_token: float, buffer_size: int) -> None:
        self._capacity = capacity
        self._max_patches = max_patches
        self._density = patches_per_token
        self._buffer_size = buffer_size
        self._first_size = max(buffer_size // 4, min(buffer_size, _SMALL_BUFFER))
        self.num_packs = 0
        self._items: list[Item] = []
        self._lengths = np.zeros(buffer_size, np.int64)
        self._patches = np.zeros(buffer_size, np.int64)

    @property
    def is_full(self) -> bool:
        return not self.num_missing

    @property
    def num_missing(self) -> int:
        """Samples that can be added before the next pack is taken."""
        size = self._first_size + self.num_packs // _PACKS_PER_SAMPLE
        missing = (self._buffer_size if size > self._buffer_size else size) - len(self._items)
        return missing if missing > 0 else 0

    @property
    def items(self) -> list[Item]:
        """The samples in the buffer, oldest first."""
        return list(self._items)

    def add(self, item: Item, length: int, patches: int) -> None:
        """Add one sample to the buffer.

        Raises:
            ValueError: The sample does not fit into an empty pack, or the buffer is full.
        """
        if not 0 < length <= self._capacity or patches < 0:
            raise ValueError(
                f"Packer: sample {item!r} of {length} tokens and {patches} patches does not fit into a pack of "
                f"{self._capacity} tokens. Drop it or raise the capacity."
            )
        count = len(self._items)
        if not self.num_missing:
            raise ValueError(
                f"Packer: the buffer of {len(self._items)} samples is full at sample {item!r}. Call next_pack first."
            )
        self._lengths[count] = length
        self._patches[count] = patches
        self._items.append(item)

    def next_pack(self) -> list[Item]:
        """Remove one pack from the buffer; empty if the buffer is empty."""
        count = len(self._items)
        if not count:
            return []
        pack = _Pack(self._lengths[:count], self._patches[:count], self._capacity, self._max_patches, self._density)
        pack.take(0)
        pack.steer(_STEER_UNTIL * self._capacity)
        pack.complete()
        pack.fill()
        self.num_packs += 1
        taken = [self._items[number] for number in pack.chosen]
        keep = pack.waiting.nonzero()[0]
        self._items = list(compress(self._items, pack.waiting.tolist()))
        self._lengths[: len(keep)] = self._lengths[keep]
        self._patches[: len(keep)] = self._patches[keep]
        return taken


class _Pack:
    """One pack that is being built."""

    def __init__(
        self,
        lengths: NDArray[np.int64],
        patches: NDArray[np.int64],
        capacity: int,
        max_patches: int,
        density: float,
    ) -> None:
        self.lengths, self.patches = lengths, patches
        self.capacity, self.density = capacity, density
        self.max_patches = max_patches
        self.free_tokens, self.free_patches = capacity, max_patches
        self.wanted_patches = density * capacity
        self.waiting = np.ones(len(lengths), np.bool_)
        self.chosen: list[int] = []
        # Positive if a sample is denser than the mixture; constant per sample, so computed once per pack.
        self.excess = patches - density * lengths

    def take(self, number: int) -> None:
        self.chosen.append(number)
        self.waiting[number] = False
        length, patches = self.lengths.item(number), self.patches.item(number)
        self.free_tokens -= length
        self.free_patches = max(0, self.free_patches - patches)  # the first sample can exceed the limit
        self.wanted_patches -= patches

    def take_all(self, numbers: NDArray[np.intp]) -> None:
        """Take samples that fit together; the pack is not steered afterwards."""
        self.chosen += numbers.tolist()
        self.waiting[numbers] = False
        self.free_tokens -= int(self.lengths[numbers].sum())
        self.free_patches -= int(self.patches[numbers].sum())

    def fitting(self) -> NDArray[np.intp]:
        fits = (self.lengths <= self.free_tokens) & (self.patches <= self.free_patches) & self.waiting
        found: NDArray[np.intp] = fits.nonzero()[0]
        return found

    def steer(self, left: float) -> None:
        """Take samples until fewer than `left` tokens are free.

        Each brings the density of the pack closest to the mixture's; older samples first on ties.
        """
        # In patches, so that it can be compared with the excess without a division.
        scale = max(self.density, 1e-9) * self.capacity
        while self.free_tokens >= left:
            candidates = self.fitting()[:_STEER_CANDIDATES]
            if not candidates.size:
                return
            gap = self.wanted_patches - self.density * self.free_tokens
            error = np.abs(gap - self.excess[candidates]) / scale
            error += _AGE_WEIGHT / _STEER_CANDIDATES * _RAMP[: candidates.size]
            self.take(int(candidates[error.argmin()]))

    def complete(self) -> None:
        """Take a subset that fills the pack, preferring samples with the density still needed.

        If it has too many patches, or so few that later packs cannot hold the rest, another subset is chosen by tokens
        and patches together, and the better one is taken.
        """
        candidates = self.fitting()
        if not candidates.size:
            return
        need = self.wanted_patches / self.free_tokens
        error = np.abs(self.patches[candidates] - need * self.lengths[candidates]) / (
            max(self.density, 1e-9) * self.capacity
        )
        error += _SUM_AGE_WEIGHT / candidates.size * np.arange(candidates.size)
        candidates = candidates[np.argsort(error, kind="stable")[:_SUM_CANDIDATES]]
        chosen = candidates[largest_sum(self.lengths[candidates].tolist(), self.free_tokens)]
        spare = self.free_patches - int(self.patches[chosen].sum())
        most_spare = self.most_spare()
        if not 0 <= spare <= most_spare:
            other = self.by_both_budgets(most_spare)
            free = self.free_tokens - int(self.lengths[chosen].sum())
            if spare < 0 or self.loss(other.free_tokens, other.free_patches) < self.loss(free, spare):
                vars(self).update(vars(other))
                return
        self.take_all(chosen)

    def by_both_budgets(self, most_spare: int) -> "_Pack":
        """A copy that is steered until a few samples are missing and completed by tokens and patches together."""
        other = copy(self)
        other.chosen, other.waiting = self.chosen.copy(), self.waiting.copy()
        other.steer(_LAST_SAMPLES * int(self.lengths.sum()) / len(self.lengths))
        candidates = other.fitting()[:_SUBSET_CANDIDATES]
        sizes = other.lengths[candidates], other.patches[candidates]
        subset = best_subset(*sizes, tokens=other.free_tokens, limit=other.free_patches, spare=most_spare)
        other.take_all(candidates[subset])
        return other

    def loss(self, free_tokens: int, free_patches: int) -> int:
        """What a pack loses by free tokens and by patches that later packs cannot make up for."""
        return free_tokens * self.max_patches + max(0, free_patches - self.most_spare()) * self.capacity

    def most_spare(self) -> int:
        """The patches that a pack may leave free without making the waiting samples too dense for later packs.

        The nearer their density is to the limit, the fewer.
        """
        waiting = int(self.patches.sum()) * self.capacity / int(self.lengths.sum())
        room = self.max_patches - max(waiting, self.density * self.capacity)
        return int((1 + _SLACK) * room) if room > 0 else 0

    def fill(self) -> None:
        """Take the largest sample that fits until no sample fits."""
        while self.free_tokens > 0 and (candidates := self.fitting()).size:
            self.take(int(candidates[self.lengths[candidates].argmax()]))


_RAMP = np.arange(_STEER_CANDIDATES)


def largest_sum(lengths: list[int], limit: int) -> list[int]:
    """Indices of a subset of `lengths` with the largest sum that does not exceed `limit`.

    Each bit of an integer records whether a sum can be reached, so adding a length is one shift and one or.
    """
    # Bit limit - s stands for sum s, so that a sum above the limit is shifted out.
    reachable = [1 << limit]
    for length in lengths:
        reachable.append(reachable[-1] | reachable[-1] >> length)
        if reachable[-1] & 1:
            break
    missing = (reachable[-1] & -reachable[-1]).bit_length() - 1
    chosen = []
    for number in range(len(reachable) - 2, -1, -1):
        if not (reachable[number] >> missing) & 1:
            chosen.append(number)
            missing += lengths[number]
    return chosen
