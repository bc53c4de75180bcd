# SPDX-License-Identifier: Apache-2.0
"""Learning rates by hand."""

import pytest

from mindvl_train import ScheduleConfig
from mindvl_train.schedule import learning_rate


def test_rates_of_ten_steps_by_hand() -> None:
    config = ScheduleConfig(steps=10, peak_lr=1.0, min_lr=0.2, lr_warmup_ratio=0.2)
    rates = [learning_rate(config, step) for step in range(10)]
    # Two steps up, then 0.2 + 0.4 * (1 + cos(pi * k / 8)) for k = 1..8.
    by_hand = [0.5, 1.0, 0.96955, 0.88284, 0.75307, 0.6, 0.44693, 0.31716, 0.23045, 0.2]
    assert rates == pytest.approx(by_hand, abs=1e-5)


def test_without_warm_up_the_cosine_starts_at_once() -> None:
    config = ScheduleConfig(steps=4, peak_lr=2.0, lr_warmup_ratio=0.0)
    rates = [learning_rate(config, step) for step in range(4)]
    assert rates == pytest.approx([2 * 0.853553, 1.0, 2 * 0.146447, 0.0], abs=1e-5)


def test_a_rate_depends_on_the_step_alone() -> None:
    config = ScheduleConfig(steps=1000, peak_lr=1e-5, min_lr=1e-6)
    assert learning_rate(config, 0) == pytest.approx(1e-7)
    assert learning_rate(config, 99) == pytest.approx(1e-5)
    assert learning_rate(config, 549) == pytest.approx(5.5e-6)
    assert learning_rate(config, 999) == pytest.approx(1e-6)
