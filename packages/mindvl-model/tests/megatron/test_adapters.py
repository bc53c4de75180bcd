# SPDX-License-Identifier: Apache-2.0
"""Adapters in every parallel layout give loss and gradients of one process; initialization and dropout do not depend on it."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from mindvl_model import MindVLConfig
from mindvl_model.adapters import LoRAConfig
from mindvl_model.megatron.adapters import add_adapters, initialize_adapters, is_adapter, set_dropout_step
from mindvl_model.testing.layouts import Case, Layouts, Outcome, packs_of
from mindvl_model.testing.tiny import (
    smallest_config,
    smallest_deepseek_v3,
    smallest_qwen2_5_vl,
    smallest_qwen3_moe,
)
from mindvl_model.weights.names import weight_rules

FOUR_LAYERS = replace(smallest_config(), language=replace(smallest_config().language, num_layers=4))
DEEPSEEK = smallest_deepseek_v3(num_layers=4)
MOE = smallest_qwen3_moe(aux_loss_weight=0.0)
PLAIN = LoRAConfig(rank=3, alpha=6)
SOME = LoRAConfig(rank=3, alpha=6, rslora=True, targets=("q_proj", "v_proj", "up_proj", "attn.proj", "mlp.2"))
DROPPED = LoRAConfig(rank=3, alpha=6, dropout=0.3)
ATTENTION_DROPPED = replace(DROPPED, targets=("q_proj", "k_proj", "o_proj", "qkv", "mlp.0"))
NORMS = LoRAConfig(rank=3, alpha=6, dora=True)
SOME_NORMS = replace(NORMS, targets=("q_proj", "v_proj", "up_proj", "attn.proj", "down_proj"))
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "qkv")


adapted = partial(Case, lora=PLAIN)
TWO_PROCESSES = {
    "tp": adapted(smallest_config(), {"tp_size": 2}),
    "tp, some layers": adapted(smallest_config(), {"tp_size": 2}, lora=SOME),
    "tp, dropout": adapted(smallest_config(), {"tp_size": 2}, "full", lora=DROPPED),
    "tp, images spread, dropout": adapted(smallest_config(), {"tp_size": 2, "spread_images": True}, lora=DROPPED),
    "cp, images spread": adapted(smallest_config(), {"cp_size": 2, "spread_images": True}),
    "cp, dropout": adapted(smallest_config(), {"cp_size": 2}, "selective", lora=DROPPED),
    "pp": adapted(smallest_config(), {"pp_size": 2}, "full"),
    "interleaved pp, dropout": adapted(FOUR_LAYERS, {"pp_size": 2, "virtual_stages": 2}, "full", lora=DROPPED),
    "dp": adapted(smallest_config(), dp_size=2),
    "tp, Qwen2": adapted(smallest_qwen2_5_vl(), {"tp_size": 2}),
    "dp ep, Qwen3-MoE": adapted(MOE, {"ep_size": 2}, dp_size=2),
    "tp ep, Qwen3-MoE": adapted(MOE, {"tp_size": 2, "ep_size": 2}),
    "tp ep, some layers, Qwen3-MoE": adapted(MOE, {"tp_size": 2, "ep_size": 2}, lora=SOME),
    "tp ep, DeepSeek-V3": adapted(DEEPSEEK, {"tp_size": 2, "ep_size": 2}),
    "tp, latent attention with dropout, DeepSeek-V3": adapted(
        DEEPSEEK, {"tp_size": 2}, "full", lora=replace(DROPPED, targets=LATENT)
    ),
    "tp, DoRA": adapted(smallest_config(), {"tp_size": 2}, "full", lora=NORMS),
    "tp, images spread, DoRA of some layers": adapted(
        smallest_qwen2_5_vl(), {"tp_size": 2, "spread_images": True}, lora=SOME_NORMS
    ),
    "tp, DoRA of some layers, Qwen2": adapted(smallest_qwen2_5_vl(), {"tp_size": 2}, lora=SOME_NORMS),
    "cp, DoRA": adapted(smallest_config(), {"cp_size": 2}, lora=NORMS),
    "tp, DoRA of latent attention, DeepSeek-V3": adapted(
        DEEPSEEK, {"tp_size": 2}, "full", lora=replace(NORMS, targets=LATENT)
    ),
    "uneven pp, DeepSeek-V3": adapted(DEEPSEEK, {"pp_size": 2, "stage_layers": (1, 3)}),
}
FOUR_PROCESSES = {
    "tp above heads of vision encoder and keys, DoRA": adapted(
        smallest_qwen2_5_vl(), {"tp_size": 4, "spread_images": True}, lora=SOME_NORMS
    ),
    "tp cp": adapted(smallest_config(), {"tp_size": 2, "cp_size": 2}, lora=DROPPED),
    "tp above heads of vision encoder and keys": adapted(
        smallest_qwen2_5_vl(), {"tp_size": 4, "spread_images": True}, lora=ATTENTION_DROPPED
    ),
    "tp cp ep, Qwen3-MoE": adapted(MOE, {"tp_size": 2, "cp_size": 2, "ep_size": 4, "spread_images": True}, "full"),
}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    return Layouts(tmp_path_factory.mktemp("layouts"))


def assert_equal(found: Outcome, expected: Outcome) -> None:
    assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5)
    assert found.mtp_loss == pytest.approx(expected.mtp_loss, rel=1e-5)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert bool(gradient.any()) == is_adapter(name), name
        assert (found.gradients[name] - gradient).abs().max() <= 2e-5 * gradient.abs().max(), name


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_two_processes_give_loss_and_gradients_of_one(layouts: Layouts, name: str) -> None:
    assert_equal(*layouts.pair(TWO_PROCESSES, name))


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("name", FOUR_PROCESSES)
def test_four_processes_give_loss_and_gradients_of_one(layouts: Layouts, name: str) -> None:
    assert_equal(*layouts.pair(FOUR_PROCESSES, name))


@pytest.mark.parametrize("config", [smallest_config(), MOE, DEEPSEEK], ids=["Qwen3", "Qwen3-MoE", "DeepSeek-V3"])
def test_an_adapted_model_equals_one_with_folded_weights(make_model: Any, config: MindVLConfig) -> None:
    """W + scaling * B A by hand, for every published layer, with the rules of the weights."""
    model, packs = make_model(config), packs_of(config)
    frozen = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    targets = ("q_b_proj", "kv_a_proj_with_mqa", *SOME.targets[2:]) if config is DEEPSEEK else SOME.targets
    add_adapters(model, config, replace(SOME, targets=targets))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    with torch.no_grad():
        adapted = [model(**pack).item() for pack in packs]
    scale = 6 / 3**0.5
    folded = make_model(config)
    held = dict(model.named_parameters())
    for rule in weight_rules(config):
        prefix = rule.param_name.removesuffix("weight") + "lora."
        if not any(name.startswith(prefix) for name in held):
            continue
        pieces = rule.split(frozen[rule.param_name])
        for index, hf_name in enumerate(rule.hf_names):
            key = hf_name.split(".")[-2]
            if f"{prefix}{key}.A" not in held:
                continue
            a, b = held[f"{prefix}{key}.A"].detach(), held[f"{prefix}{key}.B"].detach()
            if ".experts." in hf_name:
                expert = int(hf_name.split(".experts.")[1].split(".")[0])
                pieces[index] = pieces[index] + scale * (a[expert] @ b[expert]).T
            elif len(rule.hf_names) == 1:  # B is in the order of the model
                pieces[index] = rule.split(frozen[rule.param_name] + scale * b @ a)[0]
            else:
                pieces[index] = pieces[index] + scale * b @ a
        folded.get_parameter(rule.param_name).data.copy_(rule.join(pieces))
    with torch.no_grad():
        expected = [folded(**pack).item() for pack in packs]
        before = [make_model(config)(**pack).item() for pack in packs]
    assert adapted == pytest.approx(expected, rel=1e-5)
    assert adapted != pytest.approx(before, rel=1e-3)


def test_new_adapters_do_not_change_the_model_and_a_is_drawn_as_in_peft(make_model: Any) -> None:
    config = smallest_config()
    model, packs = make_model(config), packs_of(config)
    with torch.no_grad():
        before = [model(**pack).item() for pack in packs]
        add_adapters(model, config, LoRAConfig(rank=8))
        initialize_adapters(model, seed=1)
        assert [model(**pack).item() for pack in packs] == before
    held = dict(model.named_parameters())
    assert {name for name, one in held.items() if one.requires_grad} == {name for name in held if is_adapter(name)}
    values = held["language.decoder.layers.1.mlp.linear_fc2.lora.down_proj.A"]  # [8, 40]
    bound = 40**-0.5
    assert values.abs().max() <= bound
    assert values.abs().max() > 0.95 * bound
    assert not torch.equal(values[:, :24], held["language.decoder.layers.1.mlp.linear_fc1.lora.up_proj.A"])


def test_dropout_changes_with_the_step_and_is_off_in_evaluation(make_model: Any) -> None:
    config = smallest_config()
    model, (pack, *_) = make_model(config), packs_of(config)
    add_adapters(model, config, DROPPED)
    for name, parameter in model.named_parameters():
        if name.endswith(".B"):
            parameter.data.fill_(0.1)
        elif name.endswith(".A"):
            parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    losses = []
    for step in (0, 0, 1):
        set_dropout_step([model], step)
        losses.append(model(**pack).item())
    assert losses[0] == losses[1] != losses[2]
    model.eval()
    evaluated = model(**pack).item()
    set_dropout_step([model], 5)
    assert model(**pack).item() == evaluated
