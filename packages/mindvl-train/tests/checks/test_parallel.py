# SPDX-License-Identifier: Apache-2.0
"""Layouts by name, and runs that differ are found; tests of the command start processes."""

from collections.abc import Callable
from typing import Any

import pytest

from mindvl_model.parallel_config import ParallelConfig
from mindvl_model.testing.tiny import smallest_qwen3_moe
from mindvl_train import ModelSection, RunConfig, TrainError
from mindvl_train.checks.parallel import LayoutReport, in_layout, parse_layout, usual_layouts

Make = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("name", "sizes", "processes"),
    [
        ("one", {}, 1),
        ("dp2", {}, 2),
        ("tp2pp2", {"tp_size": 2, "pp_size": 2}, 4),
        ("pp2vpp2", {"pp_size": 2, "virtual_stages": 2}, 2),
        ("cp2dp2", {"cp_size": 2}, 4),
        ("ep2", {"ep_size": 2}, 2),
        ("tp2ep2", {"tp_size": 2, "ep_size": 2}, 2),
    ],
)
def test_a_layout_is_named_by_its_sizes(make_config: Make, name: str, sizes: dict[str, Any], processes: int) -> None:
    model = smallest_qwen3_moe(vocab_size=264, num_layers=4)
    config = make_config(model=ModelSection(vision=model.vision, language=model.language), global_batch_size=4)
    run, found = in_layout(config, name)
    assert run.parallel == ParallelConfig(**sizes)
    assert found == processes


@pytest.mark.parametrize("name", ["tp", "xp2", "tp2,pp2", "2tp", "", "oneone", "vpp2"])
def test_a_name_that_is_no_layout_is_refused(name: str) -> None:
    with pytest.raises(TrainError, match=r"is not a layout name|require pp_size"):
        parse_layout(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [("ep2", "no experts"), ("dp3", "global_batch_size: 2"), ("tp3", "tp_size=3|tp_size: 3")],
)
def test_a_layout_the_model_does_not_allow_is_refused_with_the_reason(make_config: Make, name: str, why: str) -> None:
    with pytest.raises(TrainError, match=f"--layouts: '{name}': .*({why})"):
        in_layout(make_config(), name)


def test_the_usual_layouts_are_those_the_model_allows(make_config: Make) -> None:
    assert usual_layouts(make_config()) == ["dp2", "tp2", "pp2", "cp2"]


def test_a_run_that_failed_or_was_not_compared_does_not_hold() -> None:
    assert not LayoutReport(layout="tp2", processes=2, steps=1, problem="no process").holds
    assert not LayoutReport(layout="tp2", processes=2, steps=1).holds
