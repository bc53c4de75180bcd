# SPDX-License-Identifier: Apache-2.0
"""Digests cover every value, name, shape and data type, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindvl_merge import directory_digest
from mindvl_merge.digests import BLOCK_VALUES, block_ranges


@given(shape=st.lists(st.sampled_from([0, 1, 3, 1000, 1 << 20, (1 << 20) + 1]), max_size=3).map(tuple))
def test_ranges_cover_a_tensor_once_in_whole_rows(shape):
    total, row = 1, 1
    for number, size in enumerate(shape):
        total, row = total * size, row * size if number else row
    edges, ranges = 0, 0
    for start, stop in block_ranges(shape):
        assert start == edges
        assert 0 < stop - start <= BLOCK_VALUES
        assert row > BLOCK_VALUES or start % row == 0
        edges, ranges = stop, ranges + 1
        if ranges > 20:
            return
    assert edges == total


def test_files_and_order_do_not_change_the_digest(make_directory, random_tensors):
    tensors = random_tensors(0)
    one = directory_digest(make_directory("a", tensors))
    assert directory_digest(make_directory("b", dict(reversed(tensors.items())), shards=2)) == one


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors["language.embed"].view(-1)[27].add_(1e-6),
        lambda tensors: tensors.update(more=torch.zeros(1)),
        lambda tensors: tensors.update({"language.norm": tensors["language.norm"].view(2, 2)}),
        lambda tensors: tensors.update({"language.norm": tensors["language.norm"].view(torch.int32)}),
        lambda tensors: tensors.update(renamed=tensors.pop("language.norm")),
    ],
)
def test_every_change_changes_the_digest(make_directory, random_tensors, change):
    tensors = random_tensors(0)
    one = directory_digest(make_directory("a", tensors))
    change(tensors)
    assert directory_digest(make_directory("b", tensors)) != one
