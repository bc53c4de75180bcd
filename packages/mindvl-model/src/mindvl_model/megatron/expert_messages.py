# SPDX-License-Identifier: Apache-2.0
"""Messages of fixed size between expert-parallel ranks, whose sizes the host does not have to read from the device.

Used by experts.py. Every rank sends a block of the same number of rows to every rank. Rows that the router leaves free
are zeros; those that do not fit raise a flag on the device, and the trainer computes the step again with exact sizes, so
that no token is dropped.
"""

import torch
from torch import Tensor

from mindvl_model.parallel_config import ExpertBlocks


class ExpertMessages:
    """The size of the messages, and the most rows that a rank had to send to one rank; shared by all layers of a model.

    Args:
        num_experts: Experts of a layer, over all ranks.
        ep_size: Expert-parallel size, above 1.
        even_rows: Rows for each rank if the longest packed sequence is evenly distributed; None: its length is unknown.
        blocks: None: every message has its exact size.
    """

    def __init__(self, num_experts: int, ep_size: int, even_rows: float | None, blocks: ExpertBlocks | None) -> None:
        self.num_local, self.ep_size, self.blocks = num_experts // ep_size, ep_size, blocks
        self.even_rows = even_rows
        self.is_exact = blocks is None  # also while a step is repeated
        self._most: Tensor | None = None  # on the device, of blocks
        self._most_on_host = 0  # of messages with exact sizes

    def padded(self, tokens: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Add tokens of zeros that fill every block, for `moe_permute`.

        A place is an expert, or the padding of a rank, which follows its experts: place = rank * (E/ep + 1) + local expert.
        If a rank gets more rows than fit, later rows move into the following block; the result is then meaningless, but
        all numbers stay in range, so that the step can be completed and repeated.

        Args:
            tokens: [T, H].
            weights: [T, K].
            experts: [T, K].

        Returns:
            Tokens [T', H], weights [T', K] and places [T', K] with T' * K = ep * rows; rows by rank and place in it
            [ep, E/ep + 1], which add up to the rows of a block.
        """
        assert self.blocks is not None
        rows, num_places, chosen = self.blocks.rows, self.num_local + 1, experts.shape[1]
        num_rows = self.ep_size * rows
        padding = num_rows - experts.numel()
        assert padding >= 0, f"a packed sequence is longer than the blocks of {rows} rows allow"
        places = experts + experts.div(self.num_local, rounding_mode="floor")
        counts = count(places, self.ep_size * num_places).view(self.ep_size, num_places)
        used = counts.sum(dim=1)
        self._most = used.max() if self._most is None else torch.maximum(self._most, used.max())
        free = _differences((rows - used).clamp(min=0).cumsum(0).clamp(max=padding))
        ends = torch.arange(1, self.ep_size + 1, device=experts.device) * num_places - 1  # the padding of each rank
        filler = ends.repeat_interleave(free, output_size=padding).to(experts.dtype).view(-1, chosen)
        in_blocks = counts.cumsum(1).clamp(max=rows)
        in_blocks[:, -1].fill_(rows)
        return (
            torch.cat((tokens, tokens.new_zeros(len(filler), tokens.shape[1]))),
            torch.cat((weights, weights.new_zeros(filler.shape))),
            torch.cat((places, filler)),
            _differences(in_blocks),
        )

    def note_exact(self, sent: list[int]) -> None:
        """Note the rows for each rank of a message with exact sizes."""
        self._most_on_host = max(self._most_on_host, *sent)

    def overflow(self) -> Tensor | None:
        """Whether rows did not fit into a block since `take_factor`, scalar on the device; None: every row fitted."""
        if self._most is None or self.blocks is None or not self.blocks.can_overflow:
            return None
        return self._most > self.blocks.rows

    def discard(self) -> None:
        """Forget the rows of blocks; called before a step is repeated, whose numbers replace them."""
        self._most = None

    def take_factor(self, device: torch.device) -> Tensor:
        """The smallest `expert_capacity_factor` that was enough since the last call, float32 scalar on the device."""
        assert self.even_rows is not None
        most = torch.full((), float(self._most_on_host), device=device)
        if self._most is not None:
            most = torch.maximum(most, self._most.float())
        self._most, self._most_on_host = None, 0
        return most / self.even_rows


def count(places: Tensor, num_places: int) -> Tensor:
    """Number of rows per place [num_places] int64, computed without host synchronization."""
    flat = places.flatten().long()
    return torch.zeros(num_places, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def _differences(ends: Tensor) -> Tensor:
    """Sizes from cumulative sizes along the last axis."""
    return torch.cat((ends[..., :1], ends[..., 1:] - ends[..., :-1]), dim=-1)
