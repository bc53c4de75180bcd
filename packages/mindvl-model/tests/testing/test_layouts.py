# SPDX-License-Identifier: Apache-2.0
"""Parallel layouts give the loss, gradients and routing of one process; assembly of tensors from shards."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mindvl_model import MindVLConfig
from mindvl_model.parallel_config import BuildConfig, RecomputeConfig
from mindvl_model.testing.layouts import Case, Layouts, Outcome, in_one_process, join, packs_of
from mindvl_model.testing.tiny import (
    smallest_config,
    smallest_deepseek_v3,
    smallest_llama,
    smallest_qwen2_5_vl,
    smallest_qwen3_moe,
    smallest_qwen3_vl,
    smallest_qwen3_vl_moe,
)

pytestmark = pytest.mark.slow

FOUR_LAYERS = replace(smallest_config(), language=replace(smallest_config().language, num_layers=4))
DEEPSEEK = smallest_deepseek_v3(num_layers=4)
MOE = smallest_qwen3_moe(aux_loss_weight=0.5)
BIASED_LLAMA = smallest_llama(attention_bias=True, mlp_bias=True)
QWEN3_VL = smallest_qwen3_vl()
THREE_FEATURES = smallest_qwen3_vl(num_layers=4, vision={"deepstack_layers": (2, 0, 1)})
QWEN3_VL_MOE = smallest_qwen3_vl_moe(aux_loss_weight=0.5)


TWO_PROCESSES = {
    "cp": Case(smallest_config(), {"cp_size": 2}, "selective"),
    "tp, images spread": Case(smallest_config(), {"tp_size": 2, "spread_images": True}),
    "cp, images spread": Case(smallest_config(), {"cp_size": 2, "spread_images": True}),
    "tp, images spread, projector alone": Case(
        smallest_config(), {"tp_size": 2, "spread_images": True}, trainable=("projector",)
    ),
    "pp, projector alone": Case(MOE, {"pp_size": 2}, "full", trainable=("projector",)),
    "cp, frozen vision_encoder": Case(smallest_config(), {"cp_size": 2}, trainable=("projector", "language")),
    "tp, whole queries": Case(smallest_deepseek_v3(q_lora_rank=None), {"tp_size": 2}),
    "interleaved pp": Case(FOUR_LAYERS, {"pp_size": 2, "virtual_stages": 2}),
    "tp, Qwen2": Case(smallest_qwen2_5_vl(), {"tp_size": 2}),
    "cp, Qwen2": Case(smallest_qwen2_5_vl(), {"cp_size": 2}),
    "vision_encoder alone on the first stage, tied head": Case(
        smallest_qwen2_5_vl(tie_embeddings=True), {"pp_size": 2, "stage_layers": (0, 2)}
    ),
    "tp, Llama": Case(smallest_llama(), {"tp_size": 2}),
    "pp, Llama": Case(smallest_llama(tie_embeddings=True), {"pp_size": 2}),
    "cp, Llama": Case(smallest_llama(), {"cp_size": 2}),
    "tp, Llama with biases": Case(BIASED_LLAMA, {"tp_size": 2}),
    "cp, Llama with biases": Case(BIASED_LLAMA, {"cp_size": 2}),
    "tp, Qwen3-VL": Case(QWEN3_VL, {"tp_size": 2}, "full"),
    "cp, Qwen3-VL, images spread": Case(QWEN3_VL, {"cp_size": 2, "spread_images": True}),
    "pp, Qwen3-VL, deepstack on both stages": Case(QWEN3_VL, {"pp_size": 2}),
    "vision_encoder alone on the first stage, Qwen3-VL": Case(QWEN3_VL, {"pp_size": 2, "stage_layers": (0, 3)}, "full"),
    "interleaved pp, deepstack on three chunks": Case(THREE_FEATURES, {"pp_size": 2, "virtual_stages": 2}),
    "ep, Qwen3-VL with experts": Case(QWEN3_VL_MOE, {"ep_size": 2}, dp_size=2),
    "tp ep, Qwen3-VL with experts": Case(QWEN3_VL_MOE, {"tp_size": 2, "ep_size": 2, "spread_images": True}),
    "tp ep, Qwen3-MoE": Case(MOE, {"tp_size": 2, "ep_size": 2}),
    "cp ep, Qwen3-MoE": Case(MOE, {"cp_size": 2, "ep_size": 2}),
    "tp, DeepSeek-V3": Case(DEEPSEEK, {"tp_size": 2}),
    "tp ep, DeepSeek-V3": Case(DEEPSEEK, {"tp_size": 2, "ep_size": 2}),
    "dp ep, DeepSeek-V3": Case(DEEPSEEK, {"ep_size": 2}, dp_size=2),
    "cp, DeepSeek-V3": Case(DEEPSEEK, {"cp_size": 2}),
    "uneven pp, DeepSeek-V3": Case(DEEPSEEK, {"pp_size": 2, "stage_layers": (1, 3)}, "full"),
}
FOUR_PROCESSES = {
    "tp cp": Case(smallest_config(), {"tp_size": 2, "cp_size": 2}),  # each tp rank has one key-value head for two
    "tp above heads of vision encoder and keys, Qwen2": Case(
        smallest_qwen2_5_vl(), {"tp_size": 4, "spread_images": True}
    ),
    "tp cp ep, Qwen3-MoE, images spread": Case(
        MOE, {"tp_size": 2, "cp_size": 2, "ep_size": 4, "spread_images": True}, "full"
    ),
    "tp pp, Qwen3-VL with experts, deepstack on both stages": Case(
        QWEN3_VL_MOE, {"tp_size": 2, "pp_size": 2, "ep_size": 2}, "full"
    ),
    "interleaved pp, cp ep, DeepSeek-V3": Case(
        DEEPSEEK, {"pp_size": 2, "virtual_stages": 2, "cp_size": 2, "ep_size": 2}
    ),
}
# Expert messages of fixed size, large enough for the routing of these packs.
TWO_PROCESSES |= {
    f"{name}, fixed sizes": replace(
        TWO_PROCESSES[name], parallel=TWO_PROCESSES[name].parallel | {"expert_capacity_factor": factor}
    )
    for name, factor in (("tp ep, Qwen3-MoE", 1.9), ("cp ep, Qwen3-MoE", 2), ("dp ep, DeepSeek-V3", 1.9))
}
FOUR_PROCESSES |= {
    f"{name}, fixed sizes": replace(
        FOUR_PROCESSES[name], parallel=FOUR_PROCESSES[name].parallel | {"expert_capacity_factor": factor}
    )
    for name, factor in (
        ("tp cp ep, Qwen3-MoE, images spread", 3),
        ("interleaved pp, cp ep, DeepSeek-V3", 1.9),
    )
}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    return Layouts(tmp_path_factory.mktemp("layouts"))


def assert_equal(found: Outcome, expected: Outcome) -> None:
    assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5)
    assert found.mtp_loss == pytest.approx(expected.mtp_loss, rel=1e-5)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert (found.gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name
    for actual, other in ((found.load, expected.load), (found.bias, expected.bias), (found.choices, expected.choices)):
        assert actual.keys() == other.keys()
        assert all(torch.equal(actual[key], other[key]) for key in other)


@pytest.mark.multi
@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_two_processes_give_loss_gradients_and_routing_of_one(layouts: Layouts, name: str) -> None:
    assert_equal(*layouts.pair(TWO_PROCESSES, name))


@pytest.mark.multi
@pytest.mark.parametrize("name", FOUR_PROCESSES)
def test_four_processes_give_loss_gradients_and_routing_of_one(layouts: Layouts, name: str) -> None:
    assert_equal(*layouts.pair(FOUR_PROCESSES, name))


@pytest.mark.multi
@pytest.mark.parametrize("name", [name for name in (*TWO_PROCESSES, *FOUR_PROCESSES) if name.endswith(", fixed sizes")])
def test_fixed_sizes_of_expert_messages_change_no_bit(layouts: Layouts, name: str) -> None:
    of = layouts.together(TWO_PROCESSES if name in TWO_PROCESSES else FOUR_PROCESSES)
    found, exact = of[name], of[name.removesuffix(", fixed sizes")]
    assert (found.loss_sum, found.mtp_loss) == (exact.loss_sum, exact.mtp_loss)
    assert all(torch.equal(found.gradients[key], exact.gradients[key]) for key in exact.gradients)
    assert all(torch.equal(found.load[key], exact.load[key]) for key in exact.load)


@pytest.mark.parametrize("recompute", [{"kind": "selective"}, {"kind": "full"}, {"kind": "full", "layers": 1}])
@pytest.mark.parametrize(
    "config", [smallest_config(), MOE, DEEPSEEK, QWEN3_VL], ids=["Qwen3", "Qwen3-MoE", "DeepSeek-V3", "Qwen3-VL"]
)
def test_recomputation_does_not_change_results(
    layouts: Layouts, config: MindVLConfig, recompute: dict[str, Any]
) -> None:
    expected = layouts.alone(config)[0]
    found, _ = in_one_process(
        config, packs_of(config), build_config=BuildConfig(recompute=RecomputeConfig(**recompute))
    )
    assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-7)  # the logits are made in pieces
    assert_equal(found, expected)


def test_every_parameter_has_a_gradient_in_the_step_that_layouts_are_compared_by(layouts: Layouts) -> None:
    """Otherwise equal gradients would not show that the layouts agree."""
    for config in (smallest_config(), smallest_qwen2_5_vl(), MOE, DEEPSEEK, QWEN3_VL):
        for name, gradient in layouts.alone(config)[0].gradients.items():
            assert gradient.any() or name.endswith("expert_bias"), name


def test_pieces_become_whole_tensors() -> None:
    parts = [[("a", (4, 2), (0, 0), torch.ones(2, 2))], [("a", (4, 2), (2, 0), torch.zeros(2, 2))]]
    assert join(parts)["a"].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]


def test_copies_that_differ_and_holes_are_refused() -> None:
    copies = [[("a", (2,), (0,), torch.ones(2))], [("a", (2,), (0,), torch.tensor([1.0, 1.1]))]]
    with pytest.raises(AssertionError, match=r"a: ranks differ by 0\.1"):
        join(copies)
    with pytest.raises(AssertionError):
        join([[("a", (4,), (0,), torch.ones(2))]])
