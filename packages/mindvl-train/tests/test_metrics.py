# SPDX-License-Identifier: Apache-2.0
"""Sums over steps become one report."""

from typing import Any

import pytest
import torch

from mindvl_train.megatron.groups import destroy_groups
from mindvl_train.metrics import Metrics
from mindvl_train.parallel import process_groups
from mindvl_train.state import TrainState
from mindvl_train.step import StepReport


class Kept:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.closed = False

    def write(self, report: dict[str, Any]) -> None:
        self.reports.append(report)

    def close(self) -> None:
        self.closed = True


def step_of(loss_sum: float, label_tokens: int) -> StepReport:
    return StepReport(
        loss_sum=torch.tensor(loss_sum),
        num_label_tokens=torch.tensor(label_tokens, dtype=torch.int),
        grad_norm=0.5,
        learning_rate=0.1,
        num_tokens=100,
        num_patches=8,
    )


def test_the_loss_is_the_mean_over_learned_tokens_since_the_last_report() -> None:
    from mindvl_model import enter

    sink, state = Kept(), TrainState(model=torch.nn.Identity(), optimizer=None, source=None)  # type: ignore[arg-type]
    with process_groups(enter(), seed=0) as place:
        metrics = Metrics([sink], every_steps=2, device=place.device)
        answers = []
        for state.step, (loss_sum, label_tokens) in enumerate([(6.0, 2), (4.0, 8), (3.0, 3), (0.0, 0)], start=1):
            answers.append(metrics.add(state, step_of(loss_sum, label_tokens), report_now=state.step == 3))
        metrics.close()
    assert answers == [None, 1.0, 1.0, 0.0]  # 10 over 10 tokens, 3 over 3, nothing over nothing
    assert [report["step"] for report in sink.reports] == [2, 3, 4]
    assert [report["label_tokens"] for report in sink.reports] == [10, 13, 13]
    assert [report["tokens"] for report in sink.reports] == [200, 300, 400]
    assert sink.reports[0]["patches_per_step"] == 8
    assert sink.reports[0]["seconds_per_step"] == pytest.approx(100 / sink.reports[0]["tokens_per_s"], rel=1e-6)
    assert (state.label_tokens, state.tokens, sink.closed) == (13, 400, True)


def test_groups_come_down_so_that_a_process_can_train_again() -> None:
    from megatron.core import parallel_state

    from mindvl_model import enter

    for _ in range(2):
        with process_groups(enter(), seed=0) as place:
            assert (place.rank, place.dp_rank, place.dp_size, place.is_first) == (0, 0, 1, True)
    assert not parallel_state.model_parallel_is_initialized()
    assert not torch.distributed.is_initialized()
    destroy_groups()  # once more does no harm
