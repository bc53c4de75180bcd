# SPDX-License-Identifier: Apache-2.0
"""Records of ranks written by hand, for the tests that judge them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mindvl_train.rehearsal.classes import RankClass
from mindvl_train.rehearsal.matching import World
from mindvl_train.rehearsal.record import POINT_TO_POINT, Group, Message, Peak, RankRecord


def message(kind: str, group: str, *, shape: Sequence[int] = (4, 8), dtype: str = "bfloat16", **more: Any) -> Message:
    """One blocking message; `World` numbers it."""
    size = shape[0] * shape[1] if len(shape) == 2 else 1
    return Message(
        index=0, step=0, phase="compute", microbatch=0, kind=kind, group=group, dtype=dtype, shapes=(tuple(shape),),
        num_elements=size, num_bytes=2 * size, caller="mindvl_train/step.py:1",
        **{"operator": 0, "source": "mindvl_train/step.py:1", "is_async": kind in POINT_TO_POINT, **more},
    )  # type: ignore[arg-type]  # fmt: skip


def record(rank: int, groups: dict[str, Sequence[int]], messages: Sequence[Message], world_size: int) -> RankRecord:
    """A record with these messages; the name of a group is its key before a slash."""
    numbered = tuple(replace(one, index=index) for index, one in enumerate(messages))
    held = {key: Group(name=key.partition("/")[0], ranks=tuple(ranks), backend="hccl") for key, ranks in groups.items()}
    return RankRecord(
        recipe="recipe.yaml", recipe_digest="00", versions={}, device="910b2", device_kind="npu", kernels={}, rank=rank,
        world_size=world_size, coordinates={}, num_steps=1, num_microbatches=1, pack={"tokens": 8}, groups=held,
        messages=numbered, phases=(), timeline=(),
        peak=Peak(num_bytes=0, operator=0, operator_name="", phase=0, source="", categories={}), persistent={},
        operators={}, waits=(), wall_s=0.0, host_peak_bytes=0,
    )  # fmt: skip


@pytest.fixture
def world() -> Callable[..., World]:
    """A world of ranks: {rank: messages}, groups by name, and optionally classes as lists of ranks."""

    def build(
        logs: dict[int, Sequence[Message]], groups: dict[str, Sequence[int]], classes: Sequence[Sequence[int]] = ()
    ) -> World:
        size = 1 + max([*logs, *(rank for ranks in [*groups.values(), *classes] for rank in ranks)])
        records = {
            rank: record(rank, {key: ranks for key, ranks in groups.items() if rank in ranks}, messages, size)
            for rank, messages in logs.items()
        }
        given = classes or [[rank] for rank in range(size)]
        return World(records, [RankClass(ranks=tuple(ranks), pp_rank=0, content="") for ranks in given])

    return build


@pytest.fixture
def collective() -> Callable[..., Message]:
    """A message by kind and group."""
    return message
