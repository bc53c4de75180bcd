# SPDX-License-Identifier: Apache-2.0
"""Steps for tests of the engines: one that measures texts, one that ends or hangs its process, and a simple set step."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Decision, Drop, Outcome, Signatures, Step, register
from mindvl_data.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Length:
    """Parameters of test_length."""

    min_length: int = 0
    refuses: bool = False


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """No parameters."""


@Step(
    name="test_length",
    config=Length,
    summary="Measure texts.",
    gives=("length", "chance"),
    reasons={"short": "The text is too short."},
)
def length(batch: list[Record], config: Length, context: Context) -> list[Outcome]:
    if config.refuses:
        raise DataError("test_length: refuses to work.")
    outcomes: list[Outcome] = []
    for record in batch:
        size = len(record.text())
        facts = {"length": size, "chance": context.random(record, "chance").random()}
        outcomes.append(Drop("short", size, facts) if size < config.min_length else record.with_facts(**facts))
    return outcomes


@Step(
    name="test_hostile",
    config=Nothing,
    summary="End the process.",
)
def hostile(batch: list[Record], config: Nothing, context: Context) -> list[Outcome]:
    for record in batch:
        words = record.text().split()
        if "abort" in words:
            os.abort()
        if "sleep" in words:
            time.sleep(3600)
        if "allocate" in words:
            np.ones(1 << 40)
        if "fill" in words:
            held = []
            while True:
                held.append(np.ones(1 << 22))
        if "raise" in words:
            raise ValueError("the text says raise")
    return list(batch)


@Step(
    name="test_split",
    config=Nothing,
    summary="Split texts.",
)
def split(batch: list[Record], config: Nothing, context: Context) -> list[Outcome]:
    """One record for each word."""
    return [[record.with_body(content=word) for word in record.text().split()] for record in batch]


def sign(batch: list[Record], config: Nothing, context: Context) -> list[Any]:
    digests = [blake2b(record.text().encode(), digest_size=8).digest() for record in batch]
    return [np.frombuffer(digest, np.uint8)[None] for digest in digests]


def decide(signatures: Signatures, config: Nothing, context: Context, scratch: Path) -> Iterator[Decision]:
    first: dict[bytes, str] = {}
    for numbers, pieces, block in signatures.blocks():
        for number, piece, signature in zip(numbers.tolist(), pieces.tolist(), block, strict=True):
            group = first.setdefault(signature.tobytes(), f"{number}:{piece}")
            if group != f"{number}:{piece}":
                yield Decision(number, piece, Drop("duplicate", f"same as {group}", {"duplicate_group": group}))


register(
    Step(
        name="test_unique", config=Nothing, summary="Drop equal texts.", section="", sign=sign, decide=decide,
        needs=("length",), gives=("duplicate_group",), reasons={"duplicate": "The text is not the first."},
    )
)  # fmt: skip
