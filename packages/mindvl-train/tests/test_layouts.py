# SPDX-License-Identifier: Apache-2.0
"""Layouts that fit, and those that are refused by the name of the field before anything is started."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mindvl_model import LanguageConfig
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen3_moe
from mindvl_train import ModelSection, RunConfig, TrainError, run_training
from mindvl_train.config import ParallelConfig, RecomputeConfig
from mindvl_train.layouts import data_parallel_size, fewest_processes, layout_of

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
    assert data_parallel_size(recipe(), 4) == 4
    assert data_parallel_size(recipe(tp_size=2, pp_size=2), 8) == 2
    assert data_parallel_size(recipe(cp_size=2, pp_size=2, virtual_stages=2), 16) == 4
    assert data_parallel_size(recipe(smallest_qwen3_moe().language, ep_size=4), 4) == 4


@pytest.mark.parametrize(
    ("settings", "processes", "message"),
    [
        ({"tp_size": 2, "pp_size": 2}, 6, r"tp_size=2 \* pp_size=2 \* cp_size=1 = 4 does not divide 6 .* parallel\."),
        ({"tp_size": 2}, 1, r"does not divide 1 processes\. parallel\. Start a multiple of 2"),
        (
            {"global_batch_size": 6},
            4,
            r"global_batch_size=6 cannot be dealt to 4 data-parallel ranks\. Recipe\. Use a mult",
        ),
        (
            {"pp_size": 2, "virtual_stages": 2, "global_batch_size": 6},
            4,
            r"global_batch_size=6 gives each of 2 .* 3 microbatches, .* groups of pp_size=2\. parallel\.virtual_stages\.",
        ),
        ({"tp_size": 8}, 8, r"parallel: tp_size=8 times cp_size=1 cannot split language\.num_heads=4"),
        ({"tp_size": 2, "cp_size": 4}, 8, r"parallel: tp_size=2 times cp_size=4 cannot split language\.num_heads=4"),
        (
            {"tp_size": 4, "spread_images": False},
            4,
            r"parallel: tp_size=4 cannot split vision\.num_heads=2\. .* spread_images",
        ),
        (
            {"pp_size": 2, "stage_layers": (1, 2)},
            2,
            r"parallel: stage_layers=\[1, 2\] add up to 3, but .* has 4 layers",
        ),
        ({"ep_size": 2}, 2, r"ep_size=2, but the model has no experts\. parallel\.ep_size\. Use 1"),
        (
            {"recompute": RecomputeConfig(kind="full", layers=5)},
            1,
            r"layers=5, but no chunk .* recompute\.layers\. Use",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_by_its_field(
    recipe: Make, settings: dict[str, Any], processes: int, message: str
) -> None:
    with pytest.raises(TrainError, match=message):
        data_parallel_size(recipe(**settings), processes)


def test_experts_need_processes_of_their_stage_and_an_even_share(recipe: Make) -> None:
    experts = smallest_qwen3_moe().language  # eight
    assert fewest_processes(recipe(experts, ep_size=4, tp_size=2)) == 4
    with pytest.raises(TrainError, match=r"ep_size=3 cannot split 8 experts\. parallel\.ep_size\. Use a divisor"):
        data_parallel_size(recipe(experts, ep_size=3, global_batch_size=9), 3)
    with pytest.raises(TrainError, match=r"ep_size=4 does not divide the 2 processes .* or a multiple of 8 processes"):
        data_parallel_size(recipe(experts, ep_size=4, pp_size=2), 4)


def test_a_tied_embedding_that_predicts_further_cannot_be_on_two_stages(recipe: Make) -> None:
    tied = replace(smallest_deepseek_v3().language, tie_embeddings=True)
    assert data_parallel_size(recipe(tied), 2) == 2
    with pytest.raises(TrainError, match=r"pp_size=2 with tied embeddings and multi-token prediction"):
        data_parallel_size(recipe(tied, pp_size=2), 2)


def test_the_layout_takes_what_the_recipe_says(recipe: Make) -> None:
    layout = layout_of(
        recipe(
            tp_size=2,
            pp_size=2,
            stage_layers=(1, 3),
            recompute=RecomputeConfig(kind="full", layers=1),
            precision="bf16",
        )
    )
    assert (layout.tp_size, layout.pp_size, layout.cp_size, layout.stage_layers) == (2, 2, 1, (1, 3))
    assert (layout.recompute, layout.recompute_layers, layout.dtype) == ("full", 1, torch.bfloat16)


def test_images_are_spread_where_that_wins_unless_the_recipe_decides(recipe: Make) -> None:
    assert not layout_of(recipe()).spread_images  # nobody to share them with
    assert layout_of(recipe(tp_size=4)).spread_images  # two heads of the vision encoder cannot be split by four
    assert not layout_of(recipe(cp_size=2, spread_images=False)).spread_images
    assert layout_of(recipe(cp_size=2, spread_images=True)).spread_images


def test_a_run_is_refused_before_anything_is_started(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    config = make_config()
    with pytest.raises(TrainError, match=r"global_batch_size=2 cannot be dealt to 3"):
        run_training(config)
    assert not config.out.exists()
