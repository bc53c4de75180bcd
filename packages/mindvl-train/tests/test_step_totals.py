# SPDX-License-Identifier: Apache-2.0
"""The totals of a step come with one message and one host wait."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindvl_model import set_up_device
from mindvl_ops.testing.fake_npu import FakeNpu
from mindvl_train.parallel_state import process_groups
from mindvl_train.step_totals import StepTotals, reduce_totals


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with process_groups(set_up_device(), seed=0):
        yield


def test_totals_of_one_rank_are_its_own_values() -> None:
    found = reduce_totals(torch.tensor(6.25), torch.tensor(3.5), 7, stop=False)
    assert found == StepTotals(grad_norm=2.5, loss_sum=3.5, num_loss_tokens=7, overflowed=False, stop=False)
    assert reduce_totals(torch.tensor(0.0), torch.tensor(0.0), 0, stop=True).stop


def test_a_value_that_is_not_finite_changes_no_other_value() -> None:
    found = reduce_totals(torch.tensor(float("nan")), torch.tensor(float("inf")), 7, stop=False)
    assert found.grad_norm != found.grad_norm
    assert (found.loss_sum, found.num_loss_tokens, found.stop) == (float("inf"), 7, False)


@pytest.mark.parametrize("overflowed", [False, True])
def test_an_overflow_on_a_rank_is_part_of_the_totals(overflowed: bool) -> None:
    found = reduce_totals(torch.tensor(1.0), torch.tensor(2.0), 7, stop=False, overflow=torch.tensor(overflowed))
    assert found == StepTotals(grad_norm=1.0, loss_sum=2.0, num_loss_tokens=7, overflowed=overflowed, stop=False)


def test_the_totals_take_one_message_of_five_numbers_and_one_host_wait(
    monkeypatch: pytest.MonkeyPatch, fake_npu: FakeNpu
) -> None:
    messages: list[torch.Size] = []
    reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        messages.append(tensor.shape)
        return reduce(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    reduce_totals(torch.tensor(1.0), torch.tensor(2.0), 7, stop=False, overflow=torch.tensor(True))
    assert messages == [torch.Size([5])]
    assert fake_npu.syncs == ["tolist"]
