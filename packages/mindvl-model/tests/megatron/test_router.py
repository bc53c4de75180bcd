# SPDX-License-Identifier: Apache-2.0
"""Statistics, bias updates and recording of routers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import smallest_deepseek_v3, smallest_qwen3_moe

Make = Callable[..., Any]
DEEPSEEK, QWEN = smallest_deepseek_v3(), smallest_qwen3_moe()


def pack(seed: int = 0, padding: int = 0) -> dict[str, Any]:
    return pack_segments([random_segment(DEEPSEEK, num_text=9 + seed, seed=seed)], padding=padding)


def biases(model: Any) -> list[torch.Tensor]:
    return [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("expert_bias")]


@pytest.mark.parametrize("config", [DEEPSEEK, QWEN], ids=["deepseek_v3", "qwen3_moe"])
def test_statistics_of_a_step_are_those_of_the_recorded_choices_of_all_its_packs(make_model: Make, config: Any) -> None:
    from mindvl_model.megatron.router import record_routing

    model = make_model(config)
    with record_routing(model) as chosen:
        model(**pack(0, padding=5)).backward()
        model(**pack(1)).backward()
    model(**pack(2))  # after the body nothing is recorded, but it is counted
    model.finish_router_step()
    statistics = model.router_statistics()
    first = config.language.num_layers - len([1 for layer in chosen if layer < config.language.num_layers])
    assert list(chosen) == [one.layer for one in statistics] == list(range(first, first + len(statistics)))
    with record_routing(model) as third:
        model(**pack(2))
    for one in statistics:
        assert [len(packs) for packs in chosen[one.layer]] == [9 + 5, 10]
        real = torch.cat([chosen[one.layer][0][:9], chosen[one.layer][1], *third[one.layer]])
        assert torch.equal(one.tokens_per_expert, torch.bincount(real.flatten(), minlength=8).float())
        assert float(one.max_violation) == pytest.approx(float(one.tokens_per_expert.max()) / (30 * 2 / 8) - 1)
        assert 0 < float(one.entropy) < math.log(8)


def test_a_bias_increases_for_underloaded_and_decreases_for_overloaded_experts(make_model: Make) -> None:
    model = make_model(DEEPSEEK)
    before = biases(model)
    model(**pack()).backward()
    assert all(torch.equal(*pair) for pair in zip(before, biases(model), strict=True))  # not before the step ends
    model.finish_router_step()
    statistics = model.router_statistics()
    assert len(statistics) == len(before) == 3
    for one, old, new in zip(statistics, before, biases(model), strict=True):
        step = torch.tensor([0.001 * (1 if load < 9 * 2 / 8 else -1) for load in one.tokens_per_expert.tolist()])
        torch.testing.assert_close(new, old + step, rtol=0, atol=1e-7)
        assert torch.equal(one.bias, new)
    assert all(not parameter.requires_grad for name, parameter in model.named_buffers() if "bias" in name)


def test_a_skipped_step_is_counted_and_moves_no_bias(make_model: Make) -> None:
    model = make_model(DEEPSEEK)
    before = biases(model)
    model(**pack()).backward()
    model.finish_router_step(move_bias=False)
    assert all(torch.equal(*pair) for pair in zip(before, biases(model), strict=True))
    assert [float(one.tokens_per_expert.sum()) for one in model.router_statistics()] == [18, 18, 18]


def test_every_step_is_counted_separately_and_evaluation_is_not_counted(make_model: Make) -> None:
    model = make_model(QWEN)
    model(**pack())
    model.finish_router_step()
    with torch.no_grad():
        model(**pack())
    model.eval()
    model(**pack())
    model.train()
    model(**pack(3))
    model.finish_router_step()
    assert [float(one.tokens_per_expert.sum()) for one in model.router_statistics()] == [12 * 2] * 2


@pytest.mark.parametrize(
    "config", [DEEPSEEK, smallest_qwen3_moe(aux_loss_weight=0.5)], ids=["deepseek_v3", "qwen3_moe"]
)
def test_recomputed_layers_are_counted_once_and_have_the_same_gradients(make_model: Make, config: Any) -> None:
    outcomes = []
    for recompute in (False, True):
        model = make_model(config)
        if recompute:
            shared = model.language.config
            shared.recompute_granularity, shared.recompute_method, shared.recompute_num_layers = "full", "uniform", 1
        model(**pack()).backward()
        model.finish_router_step()
        gradients = [parameter.grad for _, parameter in sorted(model.language.named_parameters())]
        loads = [one.tokens_per_expert for one in model.router_statistics()]
        outcomes.append(gradients + loads)
    for once, twice in zip(*outcomes, strict=True):  # the logits are recomputed too, summed in another order
        torch.testing.assert_close(once, twice, rtol=1e-5, atol=1e-6)


def test_a_frozen_language_model_keeps_its_biases(make_model: Make) -> None:
    from mindvl_model.parameters import set_trainable

    model = make_model(DEEPSEEK)
    set_trainable(model, ["projector"])
    before = biases(model)
    model(**pack())
    model.finish_router_step()
    assert all(torch.equal(*pair) for pair in zip(before, biases(model), strict=True))
    assert float(model.router_statistics()[0].tokens_per_expert.sum()) == 18


def test_a_bias_stays_in_float32_when_the_model_goes_to_16_bit(make_model: Make) -> None:
    model = make_model(DEEPSEEK)
    before = biases(model)
    model.bfloat16()
    assert model.language.decoder.layers[1].mlp.router.weight.dtype == torch.bfloat16
    assert all(torch.equal(*pair) for pair in zip(before, biases(model), strict=True))
    other = make_model(DEEPSEEK, seed=1)
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(*pair) for pair in zip(before, biases(other), strict=True))


def test_uniform_routing_has_no_violation_and_maximal_entropy(make_model: Make) -> None:
    """With zero weights all experts have the same score, so only the bias determines the selection."""
    model = make_model(DEEPSEEK)
    router = model.language.decoder.layers[1].mlp.router
    with torch.no_grad():
        router.weight.zero_()
        router.expert_bias.copy_(torch.tensor([0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.2, 0.0]))
    model(**pack())
    model.finish_router_step()
    one = model.router_statistics()[0]
    assert one.tokens_per_expert.tolist() == [0, 9, 0, 0, 0, 0, 9, 0]
    assert float(one.max_violation) == pytest.approx(3)
    assert float(one.entropy) == pytest.approx(math.log(8))
    assert one.aux_loss is None


def test_the_balancing_loss_is_a_mean_over_layers_and_tokens_times_the_loss_tokens(make_model: Make) -> None:
    """The gradient that it adds to the last router, by the formula."""
    inputs = pack(padding=5)
    num_loss_tokens = int((inputs["labels"] != -100).sum())
    seen: list[torch.Tensor] = []
    gradients = []
    for weight in (0.5, 0.0):
        model = make_model(smallest_qwen3_moe(aux_loss_weight=weight))
        router = model.language.decoder.layers[-1].mlp.router
        handle = router.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        model(**inputs).backward()
        handle.remove()
        gradients.append(router.weight.grad)
    weight = router.weight.detach().clone().requires_grad_()
    probabilities = (seen[0][:9] @ weight.T).softmax(dim=-1)  # without the padding
    share = torch.bincount(probabilities.topk(2).indices.flatten(), minlength=8) / 9
    loss = 8 * (share * probabilities.mean(dim=0)).sum()
    (expected,) = torch.autograd.grad(0.5 / 2 * loss * num_loss_tokens, weight)
    torch.testing.assert_close(gradients[0] - gradients[1], expected, rtol=1e-3, atol=1e-5)


def test_models_without_experts_have_no_statistics(make_model: Make) -> None:
    from mindvl_model.testing.tiny import smallest_config

    model = make_model(smallest_config())
    model.finish_router_step()
    assert model.router_statistics() == []
    assert model.take_mtp_loss() is None
