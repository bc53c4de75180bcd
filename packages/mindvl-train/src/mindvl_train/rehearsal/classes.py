# SPDX-License-Identifier: Apache-2.0
"""Rank classes: ranks of a layout whose step has the same operators, messages and bytes; one of each is rehearsed.

Comes after resolved_run.py, before rehearse.py; matching.py lets the rehearsed rank of a class stand for the others. The
class of a rank follows from its coordinates:

- Each pipeline rank is a class: its layers, the number of microbatches in flight and the order of its messages differ.
- With spread images, the tensor- and context-parallel ranks of the first stage that encode other images are classes.
- Data-parallel and expert-parallel ranks are equal: every microbatch of a rehearsal is the largest pack, tokens are
  spread evenly over experts, and optimizer shards have the same length, up to padding and the rounding of allocations.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mindvl_model.vision.spread import assign_frames
from mindvl_train.errors import TrainError
from mindvl_train.layout_search.packs import Pack
from mindvl_train.resolved_run import ResolvedRun


@dataclass(frozen=True, kw_only=True)
class RankClass:
    """Ranks whose rehearsals are equal."""

    ranks: tuple[int, ...]  # ascending
    pp_rank: int
    content: str  # such as "stage 1 of 2: 5 + 4 layers, head"

    @property
    def representative(self) -> int:
        """The rank that is rehearsed by default."""
        return self.ranks[0]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The ranks to rehearse."""

    ranks: tuple[int, ...]  # ascending
    rule: str  # how they were chosen, one sentence


def rank_classes(run: ResolvedRun, pack: Pack) -> list[RankClass]:
    """The classes of all ranks, by their lowest rank.

    Args:
        pack: The pack of every microbatch.
    """
    parallel, per_stage = run.parallel, run.num_processes // run.parallel.pp_size
    num_sharing = parallel.tp_size * parallel.cp_size
    shares: list[tuple[int, ...]] = [()] * num_sharing
    if parallel.spread_images:
        patches = [height * width for time, height, width in pack.grids for _ in range(time)]
        shares = [tuple(patches[frame] for frame in part) for part in assign_frames(patches, num_sharing)]
    members: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank in range(run.num_processes):
        stage = rank // per_stage
        members[stage, shares[rank % num_sharing] if stage == 0 else ()].append(rank)
    num_shares = len({share for stage, share in members if stage == 0})
    return [
        RankClass(ranks=tuple(ranks), pp_rank=stage, content=_content(run, stage, share if num_shares > 1 else None))
        for (stage, share), ranks in sorted(members.items(), key=lambda item: item[1][0])
    ]


def _content(run: ResolvedRun, stage: int, share: tuple[int, ...] | None) -> str:
    size, last = run.parallel.pp_size, stage == run.parallel.pp_size - 1
    layers = " + ".join(str(count) for count in run.chunk_layers[stage::size])
    parts = [f"{layers} layers"]
    if stage == 0:
        images = "" if share is None else f" with {len(share)} images of {sum(share):,} patches"
        parts += [f"vision encoder{images}", "projector", "embedding"]
    if last:
        parts += ["multi-token prediction"] * bool(run.model.language.num_mtp_layers) + ["head"]
    return f"stage {stage} of {size}: {', '.join(parts)}"


def class_of(classes: Sequence[RankClass], rank: int) -> RankClass:
    """The class of a rank."""
    return next(each for each in classes if rank in each.ranks)


def select_ranks(run: ResolvedRun, classes: Sequence[RankClass], choice: str | None) -> Selection:
    """The ranks to rehearse.

    Args:
        choice: None: one of each class; "all": also further ranks of each class and neighbours in every group; or
            rank numbers separated by commas.

    Raises:
        TrainError: The choice is of another form, or names a rank that the job does not have.
    """
    if choice is None:
        ranks = tuple(each.representative for each in classes)
        return Selection(ranks=ranks, rule=f"one rank of each of the {len(classes)} classes of equal ranks")
    if choice == "all":
        sampled = tuple(sorted({rank for each in classes for rank in _samples(run, each)}))
        return Selection(
            ranks=sampled,
            rule=f"a sample of {len(sampled)} of {run.num_processes:,} ranks: of each of the {len(classes)} classes the "
            "first rank, its neighbour in every group, and the last rank",
        )
    words = choice.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise TrainError(f"--ranks: must be all, or rank numbers separated by commas, got {choice!r}. Use 0,1 or all.")
    ranks = tuple(sorted({int(word) for word in words}))
    if ranks[-1] >= run.num_processes:
        raise TrainError(
            f"--ranks: {ranks[-1]} is not a rank of {run.num_processes:,} processes. Use at most {run.num_processes - 1}."
        )
    return Selection(ranks=ranks, rule="the ranks given by --ranks")


def _samples(run: ResolvedRun, each: RankClass) -> set[int]:
    """The first and last rank of a class, and the neighbours of the first in its groups inside the stage."""
    parallel, first = run.parallel, each.representative
    per_stage = run.num_processes // parallel.pp_size
    within = first % per_stage
    sizes = {
        1: parallel.tp_size,
        parallel.tp_size: parallel.cp_size,
        parallel.tp_size * parallel.cp_size: run.dp_size,
    }
    sample = {first, each.ranks[-1]}
    for stride, size in sizes.items():
        if size > 1:
            place = within // stride % size
            sample.add(first + ((place + 1) % size - place) * stride)
    if parallel.ep_size > 1:  # experts are sharded over all ranks of a stage: neighbours in both expert groups
        place = within % parallel.ep_size
        sample.add(first + (place + 1) % parallel.ep_size - place)
        if within + parallel.ep_size < per_stage:
            sample.add(first + parallel.ep_size)
    return sample
