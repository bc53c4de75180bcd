# SPDX-License-Identifier: Apache-2.0
"""Values derived from a recipe, and parallel layouts that are refused before anything is started."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mindvl_model import LanguageConfig
from mindvl_model.parallel_config import ParallelConfig, RecomputeConfig
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen3_moe
from mindvl_train import ModelSection, RunConfig, TrainError, run_training
from mindvl_train.resolved_run import capacity_warning, min_processes, resolve_run

Make = Callable[..., RunConfig]


@pytest.fixture
def recipe(make_config: Make) -> Make:
    """A run of eight packs a step with four layers of language, in a layout."""

    def make(language: LanguageConfig | None = None, *, layers: int = 4, **settings: Any) -> RunConfig:
        parallel = {name: settings.pop(name) for name in list(settings) if name in ParallelConfig.__dataclass_fields__}
        vision = smallest_config().vision
        language = language or replace(smallest_config().language, num_layers=layers)
        return make_config(
            **{"global_batch_size": 8, "parallel": ParallelConfig(**parallel)} | settings,
            model=ModelSection(vision=vision, language=language),
        )

    return make


def test_what_tensor_pipeline_and_context_parallel_leave_is_data_parallel(recipe: Make) -> None:
    assert resolve_run(recipe(), 4).dp_size == 4
    assert resolve_run(recipe(tp_size=2, pp_size=2), 8).dp_size == 2
    assert resolve_run(recipe(cp_size=2, pp_size=2, virtual_stages=2), 16).dp_size == 4
    assert resolve_run(recipe(smallest_qwen3_moe().language, ep_size=4), 4).dp_size == 4


@pytest.mark.parametrize(
    ("settings", "processes", "message"),
    [
        ({"tp_size": 2, "pp_size": 2}, 6, r"tp_size=2 \* pp_size=2 \* cp_size=1 = 4 does not divide 6 processes\."),
        ({"tp_size": 2}, 1, r"does not divide 1 processes\. Start a multiple of 2"),
        (
            {"global_batch_size": 6},
            4,
            r"global_batch_size: 6 is not divisible by dp_size=4\. Use a multiple of 4",
        ),
        (
            {"pp_size": 2, "virtual_stages": 2, "global_batch_size": 6},
            4,
            r"global_batch_size: 6 is 3 microbatches per data-parallel rank, .* multiple of pp_size=2\.",
        ),
        ({"tp_size": 8}, 8, r"parallel: tp_size=8 \* cp_size=1 = 8 does not divide language\.num_heads=4"),
        (
            {"tp_size": 2, "cp_size": 4},
            8,
            r"parallel: tp_size=2 \* cp_size=4 = 8 does not divide language\.num_heads=4",
        ),
        (
            {"tp_size": 4, "spread_images": False},
            4,
            r"parallel\.tp_size: 4 does not divide vision\.num_heads=2\. .* spread_images",
        ),
        (
            {"pp_size": 2, "stage_layers": (1, 2)},
            2,
            r"parallel\.stage_layers: \[1, 2\] add up to 3, but .* has 4 layers",
        ),
        ({"ep_size": 2}, 2, r"parallel\.ep_size: 2, but the model has no experts\. Use 1"),
        (
            {"recompute": RecomputeConfig(kind="full", layers=5)},
            1,
            r"recompute\.layers: 5, but no model chunk .* Use",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_by_its_field(
    recipe: Make, settings: dict[str, Any], processes: int, message: str
) -> None:
    with pytest.raises(TrainError, match=message):
        resolve_run(recipe(**settings), processes)


def test_experts_need_processes_of_their_stage_and_an_even_share(recipe: Make) -> None:
    experts = smallest_qwen3_moe().language  # eight
    assert min_processes(ParallelConfig(ep_size=4, tp_size=2)) == 4
    with pytest.raises(TrainError, match=r"parallel\.ep_size: 3 does not divide num_experts=8\. Use a divisor"):
        resolve_run(recipe(experts, ep_size=3, global_batch_size=9), 3)
    with pytest.raises(
        TrainError, match=r"parallel\.ep_size: 4 does not divide the 2 processes .* or a multiple of 8 processes"
    ):
        resolve_run(recipe(experts, ep_size=4, pp_size=2), 4)


def test_a_tied_embedding_that_predicts_further_cannot_be_on_two_stages(recipe: Make) -> None:
    tied = replace(smallest_deepseek_v3().language, tie_embeddings=True)
    assert resolve_run(recipe(tied), 2).dp_size == 2
    with pytest.raises(TrainError, match=r"pp_size: 2 with tied embeddings and num_mtp_layers=1"):
        resolve_run(recipe(tied, pp_size=2), 2)


def test_the_build_config_has_the_settings_of_the_recipe(recipe: Make) -> None:
    run = resolve_run(
        recipe(
            tp_size=2,
            pp_size=2,
            stage_layers=(1, 3),
            recompute=RecomputeConfig(kind="full", layers=1),
            precision="bf16",
        ),
        4,
    )
    assert (run.parallel.tp_size, run.parallel.pp_size, run.parallel.cp_size, run.chunk_layers) == (2, 2, 1, (1, 3))
    assert (run.build.recompute.kind, run.build.recompute.layers, run.build.dtype) == ("full", 1, torch.bfloat16)


def test_images_are_spread_where_that_wins_unless_the_recipe_decides(recipe: Make) -> None:
    assert not resolve_run(recipe(), 1).parallel.spread_images  # one rank
    assert resolve_run(
        recipe(tp_size=4), 4
    ).parallel.spread_images  # two heads of the vision encoder cannot be split by four
    assert not resolve_run(recipe(cp_size=2, spread_images=False), 2).parallel.spread_images
    assert resolve_run(recipe(cp_size=2, spread_images=True), 2).parallel.spread_images


def test_a_run_is_refused_before_anything_is_started(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    config = make_config()
    with pytest.raises(TrainError, match=r"global_batch_size: 2 is not divisible by dp_size=3"):
        run_training(config)
    assert not config.out.exists()


def test_a_capacity_without_effect_or_without_overflow_is_named(recipe: Make) -> None:
    """96 tokens with two experts each on four ranks: 48 rows are even, and at most 192 rows are for one rank."""
    experts = smallest_qwen3_moe().language
    assert capacity_warning(resolve_run(recipe(experts, ep_size=4), 4)) == []
    assert capacity_warning(resolve_run(recipe(experts, ep_size=4, expert_capacity_factor=3.9), 4)) == []
    (alone,) = capacity_warning(resolve_run(recipe(experts, expert_capacity_factor=1.5), 4))
    assert "parallel.expert_capacity_factor: 1.5 has no effect with ep_size=1" in alone
    (large,) = capacity_warning(resolve_run(recipe(experts, ep_size=4, expert_capacity_factor=5), 4))
    assert "room for any routing with 192 rows, so no step is repeated" in large
