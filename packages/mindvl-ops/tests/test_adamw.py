# SPDX-License-Identifier: Apache-2.0
"""The optimizer: against torch's own, its state, and exact continuation."""

import pytest
import torch

from mindvl_ops import AdamW, OpsError, adamw


def _train(optimizer, params, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def _params():
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(4, 3, generator=generator)), torch.nn.Parameter(torch.ones(3))]


def test_equals_torch_adamw():
    ours, theirs = _params(), _params()
    arguments = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    _train(AdamW(ours, **arguments), ours, 7, seed=2)
    _train(torch.optim.AdamW(theirs, **arguments), theirs, 7, seed=2)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)


def test_state_has_the_shape_that_megatron_expects():
    params = _params()
    optimizer = AdamW([{"params": params, "wd_mult": 1.0}], lr=0.1, weight_decay=0.0, betas=(0.9, 0.99), eps=1e-8)
    _train(optimizer, params, 3, seed=0)
    state = optimizer.state_dict()
    assert [group["step"] for group in state["param_groups"]] == [3]
    assert isinstance(state["param_groups"][0]["step"], int)
    assert {frozenset(entry) for entry in state["state"].values()} == {frozenset({"exp_avg", "exp_avg_sq"})}


def test_stop_and_continue_equals_never_stopping_bit_for_bit():
    whole = _params()
    optimizer = AdamW(whole, lr=0.1, weight_decay=0.01)
    _train(optimizer, whole, 3, seed=0)
    _train(optimizer, whole, 3, seed=1)

    cut = _params()
    first = AdamW(cut, lr=0.1, weight_decay=0.01)
    _train(first, cut, 3, seed=0)
    second = AdamW(cut, lr=0.5)
    second.load_state_dict(first.state_dict())
    _train(second, cut, 3, seed=1)
    assert all(torch.equal(left, right) for left, right in zip(whole, cut, strict=True))


def test_state_made_by_the_caller_is_used():
    params = _params()
    optimizer = AdamW(params, lr=0.1)
    for param in params:
        optimizer.state[param]["exp_avg"] = torch.ones_like(param)
        optimizer.state[param]["exp_avg_sq"] = torch.ones_like(param)
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    torch.testing.assert_close(optimizer.state[params[0]]["exp_avg"], torch.full((4, 3), 0.9))
    assert torch.equal(optimizer.state[params[1]]["exp_avg"], torch.ones(3))  # no gradient, no update


@pytest.mark.parametrize("chunk", [1, 14, 1 << 25])
def test_a_state_on_the_host_changes_no_number(monkeypatch: pytest.MonkeyPatch, chunk: int):
    monkeypatch.setattr(adamw, "_CHUNK_ELEMENTS", chunk)
    params, others = _params(), _params()
    plain, offloaded = AdamW(params, lr=0.1), AdamW(others, lr=0.1, host_state=True)
    offloaded.initialize_state(others[0])
    _train(plain, params, 3, seed=0)
    _train(offloaded, others, 3, seed=0)
    for left, right in zip(params, others, strict=True):
        assert torch.equal(left, right)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(plain.state[left][name], offloaded.state[right][name])
            assert offloaded.state[right][name].device.type == "cpu"


def test_values_out_of_range_are_refused():
    with pytest.raises(OpsError, match="out of range"):
        AdamW(_params(), betas=(0.9, 1.0))
