# SPDX-License-Identifier: Apache-2.0
"""Differences from the base by hand."""

import numpy as np

from mindvl_merge.methods import task_arithmetic


def test_weighted_differences_are_added_to_the_base():
    models, base = [np.array([2.0, 1.0]), np.array([1.0, 5.0])], np.array([1.0, 1.0])
    assert task_arithmetic([*models, base], (1.0, 0.5), scale=1.0).tolist() == [2.0, 3.0]
    assert task_arithmetic([*models, base], (1.0, 0.5), scale=0.5).tolist() == [1.5, 2.0]
