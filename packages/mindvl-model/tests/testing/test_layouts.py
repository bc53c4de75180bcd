# SPDX-License-Identifier: Apache-2.0
"""Pieces of tensors from several ranks; whole layouts are compared by the tests of language families."""

import pytest
import torch

from mindvl_model.testing.layouts import join


def test_pieces_become_whole_tensors() -> None:
    parts = [[("a", (4, 2), (0, 0), torch.ones(2, 2))], [("a", (4, 2), (2, 0), torch.zeros(2, 2))]]
    assert join(parts)["a"].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]


def test_copies_that_differ_and_holes_are_refused() -> None:
    copies = [[("a", (2,), (0,), torch.ones(2))], [("a", (2,), (0,), torch.tensor([1.0, 1.1]))]]
    with pytest.raises(AssertionError, match=r"a: ranks differ by 0\.1"):
        join(copies)
    with pytest.raises(AssertionError):
        join([[("a", (4,), (0,), torch.ones(2))]])
