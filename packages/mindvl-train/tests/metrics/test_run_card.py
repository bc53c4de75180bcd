# SPDX-License-Identifier: Apache-2.0
"""A run says what it is before its first step."""

import json
from collections.abc import Callable
from dataclasses import replace

import torch

from mindvl_data import SourceConfig
from mindvl_model.testing.tiny import smallest_config
from mindvl_train import MetricsConfig, RunConfig
from mindvl_train.metrics.run_card import run_facts, write_card
from mindvl_train.parallel_state import ParallelState

CPU = torch.device("cpu")


def test_the_card_holds_sizes_by_part_sources_and_where_the_peak_is_from(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(phase="warmup", metrics=MetricsConfig(peak_tflops=2.5))
    config.out.mkdir()
    write_card(config, smallest_config(), ParallelState(rank=0, device=CPU, dp_size=2), start_step=3)
    card = json.loads((config.out / "run.json").read_text())
    sizes = card["parameters"]
    assert sizes["total"] == sizes["vision"] + sizes["projector"] + sizes["language"]
    assert sizes["trained"] == sizes["projector"]
    assert (card["trained_parts"], card["frozen_parts"]) == (["projector"], ["vision", "language"])
    assert [source["name"] for source in card["data"]["sources"]] == ["pages", "photos", "text"]
    assert sum(source["share_asked"] for source in card["data"]["sources"]) == 1
    assert (card["hardware"]["peak_tflops"], card["hardware"]["peak_source"]) == (2.5, "metrics.peak_tflops")
    assert (card["hardware"]["device"], card["hardware"]["count"], card["start_step"]) == ("cpu", 2, 3)
    assert torch.__version__.startswith(card["versions"]["torch"].partition("+")[0])


def test_a_cpu_has_no_peak_unless_the_recipe_says_one(make_config: Callable[..., RunConfig]) -> None:
    assert run_facts(make_config(), smallest_config(), CPU).peak_tflops is None
    facts = run_facts(make_config(metrics=MetricsConfig(peak_tflops=2.5)), smallest_config(), CPU)
    assert facts.peak_tflops == 2.5
    assert facts.sources == ("pages", "photos", "text")


def test_a_password_in_the_address_of_a_source_stays_out_of_the_card(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    config.out.mkdir()
    data = replace(config.data, sources=(SourceConfig(name="a", path="s3://me:pa55@bucket/a"),))
    write_card(
        replace(config, data=data), smallest_config(), ParallelState(rank=0, device=CPU, dp_size=1), start_step=0
    )
    text = (config.out / "run.json").read_text()
    assert "s3://***@bucket/a" in text
    assert "pa55" not in text
