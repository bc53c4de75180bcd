# SPDX-License-Identifier: Apache-2.0
"""Cursor: a stream that can be entered anywhere, epoch after epoch."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from mindvl_data import DataConfig, Tokenizer
from mindvl_data.order.cursor import Cursor
from mindvl_data.order.sources import SourceIndex
from mindvl_data.shards.files import ShardFiles


@pytest.fixture
def source(make_config: Callable[..., DataConfig], tokenizer: Tokenizer) -> Iterator[SourceIndex]:
    files = ShardFiles()
    config = make_config()
    yield SourceIndex(replace(config.sources[0], max_epochs=3), config, tokenizer, files)
    files.close()


def stream(cursor: Cursor) -> list[tuple[int, int, int, int, int]]:
    found = []
    while (sample := cursor.next()) is not None:
        found.append(sample)
    return found


def test_each_epoch_holds_every_sample_once(source: SourceIndex) -> None:
    whole = stream(Cursor(source, seed=1, window=20))
    for epoch in range(3):
        rows = {(shard, row) for e, shard, row, _, _ in whole if e == epoch}
        assert rows == {(shard, row) for shard, size in enumerate((16, 16, 16, 12)) for row in range(size)}
    assert len(whole) == 180
    orders = {tuple((shard, row) for e, shard, row, _, _ in whole if e == epoch) for epoch in range(3)}
    assert len(orders) == 3  # each epoch has another order
    for _, shard, row, tokens, patches in whole[::17]:
        lengths = source.lengths(shard)
        assert (tokens, patches) == (lengths[0][row], lengths[1][row])


@pytest.mark.parametrize("at", [0, 1, 15, 16, 59, 60, 101, 179, 180])
def test_it_continues_from_any_position(source: SourceIndex, at: int) -> None:
    whole = stream(Cursor(source, seed=1, window=20))
    cursor = Cursor(source, seed=1, window=20)
    cursor.seek(at // 60, at % 60)
    assert stream(cursor) == whole[at:]


def test_position_and_epoch_count_what_was_given(source: SourceIndex) -> None:
    cursor = Cursor(source, seed=1, window=20)
    for number in range(1, 181):
        assert not cursor.is_exhausted
        cursor.next()
        assert (cursor.epoch, cursor.position) == divmod(number, 60)
    assert cursor.is_exhausted
