# SPDX-License-Identifier: Apache-2.0
"""The registry of curation steps and the generator of a record."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Step, all_steps, find_step, register
from mindvl_data.errors import DataError


@dataclass(frozen=True)
class _Nothing:
    pass


def test_an_unknown_step_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="'sharpen' does not exist"):
        find_step("sharpen")


def test_a_step_with_neither_function_nor_signatures_cannot_be_registered() -> None:
    with pytest.raises(AssertionError):
        register(Step(name="empty", config=_Nothing, summary=""))
    assert "empty" not in all_steps()


def test_the_generator_depends_on_seed_record_and_purpose_only(tmp_path: Path) -> None:
    record = Record(number=5, id="a", body={})
    first = Context(seed=1, cache=tmp_path).random(record, "grounding").random()
    assert first == Context(seed=1, cache=tmp_path / "b").random(record.with_facts(x=1), "grounding").random()
    others = [
        Context(seed=2, cache=tmp_path).random(record, "grounding").random(),
        Context(seed=1, cache=tmp_path).random(record, "sampling").random(),
        Context(seed=1, cache=tmp_path).random(Record(number=6, id="a", body={}), "grounding").random(),
    ]
    assert first not in others


def test_a_resource_is_built_once(tmp_path: Path) -> None:
    context = Context(seed=0, cache=tmp_path)
    assert context.resource("model", object) is context.resource("model", object)
