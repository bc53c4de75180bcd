# SPDX-License-Identifier: Apache-2.0
"""What a curation step is, and the registry of all steps.

A record step is a function over a batch: it returns, for each record, the record (with more facts or a changed body), a
Drop with a reason code, or a list of records made from it. Its result depends on the record, the parameters and the seed
only, so that batch size, engine and number of workers change nothing.

A set step needs all records: it computes signatures per batch, decides once over all signatures, which may be larger than
memory, and its decisions are applied to the records afterwards (duplicates, clusters, sampling).

Comes after record.py; the steps are in the modules that `STEP_MODULES` lists; engines call them.
"""

import importlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.record import Record
from mindvl_data.errors import DataError

# Modules that register steps when they are imported; a module imports libraries of an extra inside its functions only.
STEP_MODULES: tuple[str, ...] = (
    "annotations",
    "class_sampling",
    "classification",
    "clusters.cluster",
    "clusters.labels",
    "clusters.sample",
    "contamination.decontaminate",
    "coverage",
    "documents",
    "duplicates.embedding",
    "duplicates.exact",
    "duplicates.minhash",
    "duplicates.perceptual",
    "garbled_text",
    "grounding",
    "image_rules",
    "instruction_writing",
    "interleaved",
    "judging",
    "model_scores",
    "reannotation",
    "rendering",
    "scene_ocr",
    "tables",
    "text_filters",
    "text_rules",
    "verification",
)

# Key in `Context.resources` of a function that the engines set: a step that waits for an answer which is bounded in time
# calls it now and then with the seconds it has just waited. They are not taken for a hang or for slow work.
ON_WAITING = "on_waiting"

T = TypeVar("T")


@dataclass(frozen=True)
class Drop:
    """The decision to drop a record.

    Attributes:
        reason: One of the reason codes that the step declares.
        value: The value that decided, for the page: 0.31, "fr", "same as photos/shard-000001.tar:000004".
        facts: Facts measured before the decision, for the histograms.
    """

    reason: str
    value: Any = None
    facts: dict[str, Any] = field(default_factory=dict)


Outcome = Record | Drop | list[Record]


@dataclass(frozen=True)
class Context:
    """What a step may use besides its batch.

    Attributes:
        seed: Seed of the pipeline.
        cache: Directory of this output for files that survive a restart (lists for people, clusters). Shared by all workers.
        answers: Directory for answers of endpoints, which samples and the full run of a pipeline share; `cache` if None.
        resources: Objects that the process keeps between batches (models, tables), by key. See `resource`.
        on_loading: Called with True before a resource is built and with False after it; the engines then allow more time.
    """

    seed: int
    cache: Path
    answers: Path | None = None
    resources: dict[Any, Any] = field(default_factory=dict)
    on_loading: Callable[[bool], None] = lambda is_loading: None

    def resource(self, key: Any, build: Callable[[], T]) -> T:
        """An object that is built once per process, for example a model: `context.resource(("clip", path), load)`."""
        if key not in self.resources:
            self.on_loading(True)
            self.resources[key] = build()
            self.on_loading(False)
        value: T = self.resources[key]
        return value

    def random(self, record: Record, purpose: str) -> random.Random:
        """A generator that depends on the seed, the record and `purpose` only."""
        text = f"{self.seed}/{purpose}/{record.number}/{record.piece}"
        return random.Random(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little"))


RecordFunction = Callable[[list[Record], Any, Context], Sequence[Outcome]]
F = TypeVar("F", bound=RecordFunction)


class Signatures(Protocol):
    """Signatures of all records that reached a set step, on disk; may be larger than memory. Readable many times."""

    width: int  # bytes per signature
    num_rows: int

    def blocks(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8]]]:
        """Blocks in input order: record numbers [R], pieces [R], signatures [R, width]; bounded in size."""


@dataclass(frozen=True)
class Decision:
    """The decision of a set step about one record; records without a decision are kept as they are."""

    number: int
    piece: int = 0
    drop: Drop | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # added to the record if it is kept


# batch -> for each record an array [k, width] of uint8: any number of signatures of a fixed width
SignFunction = Callable[[list[Record], Any, Context], Sequence[NDArray[np.uint8]]]
# (signatures, config, context, empty directory for temporary files) -> decisions, in any order, at most one per record
DecideFunction = Callable[[Signatures, Any, Context, Path], Iterable[Decision]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step as it is registered: exactly one of `function` and (`sign`, `decide`) is given.

    As a decorator, `@Step(config=..., summary=...)`, it registers the function of a record step under its own name.

    Attributes:
        name: Name in the YAML file.
        config: Frozen dataclass of its parameters; every field has a type and, where possible, a default. A value that is
            not valid raises ValueError("FIELD: WHAT. WHAT TO DO.") in `__post_init__`.
        summary: One sentence for `--explain`.
        section: Section of the paper, for example "B.1.1"; "" if the paper does not have the step.
        needs: Facts of earlier steps that it reads, or "image", "text", "document".
        gives: Facts that it writes.
        reasons: Reason code -> sentence.
        extra: Extras of mindvl-data that it needs beside `curation`, for example "ocr".
        prepare: Called once in the main process before any worker starts: checks files and endpoints, raises DataError.
    """

    name: str = ""
    config: type
    summary: str
    section: str = ""
    needs: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    extra: str | None = None
    function: RecordFunction | None = None
    sign: SignFunction | None = None
    decide: DecideFunction | None = None
    prepare: Callable[[Any, Context], object] | None = None

    def __call__(self, function: F) -> F:
        register(replace(self, name=self.name or function.__name__, function=function))
        return function


_STEPS: dict[str, Step] = {}


def register(step: Step) -> Step:
    """Add a step to the registry; a name is registered once."""
    assert step.name not in _STEPS, f"step {step.name} is registered twice"
    assert (step.function is None) == (step.sign is not None and step.decide is not None), step.name
    _STEPS[step.name] = step
    return step


def all_steps() -> dict[str, Step]:
    """Every step by name."""
    for module in STEP_MODULES:
        importlib.import_module(f"mindvl_data.curation.{module}")
    return dict(sorted(_STEPS.items()))


def find_step(name: str) -> Step:
    """The step of this name.

    Raises:
        DataError: No step has this name.
    """
    steps = all_steps()
    if name not in steps:
        raise DataError(f"steps: the step {name!r} does not exist. Use one of {', '.join(steps)}.")
    return steps[name]
