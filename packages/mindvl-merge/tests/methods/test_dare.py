# SPDX-License-Identifier: Apache-2.0
"""Dropped differences: the kept share, their size, and the same random numbers wherever they are drawn."""

from functools import partial

import numpy as np
import pytest

from mindvl_merge.methods import dare, task_arithmetic

RANDOM = np.random.default_rng(0).standard_normal((3, 40_000))
one_of = partial(dare, scale=1.0, seed=5, name="model.norm.weight", position=0)


def test_kept_differences_are_rescaled_and_about_density_of_them_are_kept():
    model, base = RANDOM[0], RANDOM[2]
    delta = one_of([model, base], (1.0,), density=0.25, elect_signs=False) - base
    kept = np.abs(delta) > 0
    assert kept.mean() == pytest.approx(0.25, abs=0.01)
    assert delta[kept] == pytest.approx(4 * (model - base)[kept])


def test_without_dropping_it_is_task_arithmetic():
    blocks = [*RANDOM]
    merged = one_of(blocks, (0.5, 1.0), density=1.0, elect_signs=False)
    assert merged == pytest.approx(task_arithmetic(blocks, (0.5, 1.0), scale=1.0))


def test_elected_signs_drop_what_disagrees():
    blocks = [np.array([3.0, -1.0]), np.array([1.0, 4.0]), np.zeros(2)]
    assert one_of(blocks, (1.0, 1.0), density=1.0, elect_signs=True) == pytest.approx([4.0, 4.0])


@pytest.mark.parametrize("change", [{"seed": 6}, {"name": "lm_head.weight"}, {"position": 1}])
def test_random_numbers_depend_on_seed_tensor_and_position_only(change):
    blocks = [*RANDOM]
    draw = partial(one_of, blocks, (1.0, 1.0), density=0.5, elect_signs=False)
    assert np.array_equal(draw(), draw())
    assert not np.array_equal(draw(), draw(**change))


def test_each_model_has_its_own_random_numbers():
    base = np.zeros(40_000)
    merged = one_of([base + 1, base + 2, base], (1.0, 1.0), density=0.5, elect_signs=False)
    # Kept values are doubled: a quarter each of none, only the first, only the second, and both.
    assert [np.mean(merged == value) for value in (0, 2, 4, 6)] == pytest.approx([0.25] * 4, abs=0.02)
