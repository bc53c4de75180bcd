# SPDX-License-Identifier: Apache-2.0
"""Tests of reading samples: against tarfile's own reading, damage reported by sample, bytes counted over ranks."""

import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mindvl_data import DataConfig, Loader
from mindvl_data.errors import SampleError
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import ShardIndex, open_index
from mindvl_data.shards.reading import read_records, read_sample, read_samples
from mindvl_data.types import RawSample


@pytest.fixture
def shard(shard_directories: dict[str, Path]) -> ShardIndex:
    return open_index(shard_directories["images"]).shards[0]


def test_samples_hold_what_tarfile_finds_in_any_order(shard: ShardIndex) -> None:
    by_key: dict[str, list[bytes]] = {}
    with tarfile.open(shard.path) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            by_key.setdefault(member.name.split(".", 1)[0], []).append(content.read())
    rows = [5, 0, 1, 2, 15, 5]
    found = read_samples(shard, rows, ShardFiles())
    keys = list(by_key)
    for row, sample in zip(rows, found, strict=True):
        assert isinstance(sample, RawSample)
        assert sample.key == keys[row]
        assert [sample.record, *sample.media] == by_key[keys[row]]
        assert json.loads(sample.record)["id"] == f"n{row}"
        assert read_sample(shard, row, ShardFiles()) == sample


def test_a_whole_shard_in_order_is_few_reads(shard: ShardIndex) -> None:
    files = ShardFiles()
    read_samples(shard, range(len(shard.samples)), files)
    report = files.report()
    assert report["requests"] < len(shard.samples) / 2
    assert report["bytes_wanted"] <= report["bytes_read"] <= 1.02 * report["bytes_wanted"]


def test_records_alone_are_those_of_the_samples_for_a_part_of_the_bytes(shard: ShardIndex) -> None:
    rows, files = [7, 0, 3], ShardFiles()
    found, whole = read_records(shard, rows, files), read_samples(shard, rows, ShardFiles())
    for record, sample in zip(found, whole, strict=True):
        assert isinstance(sample, RawSample)
        assert record == replace(sample, media=())
    lengths = shard.samples["length"][rows]
    assert files.report()["bytes_read"] < 0.2 * lengths.sum()


def test_only_the_damaged_sample_is_bad(shard: ShardIndex, tmp_path: Path) -> None:
    content = bytearray(Path(shard.path).read_bytes())
    content[int(shard.samples["offset"][1]) + 3] ^= 1
    path = tmp_path / "damaged.tar"
    path.write_bytes(content)
    damaged = ShardIndex(**(vars(shard) | {"path": path}))
    good, bad, other = read_samples(damaged, [0, 1, 2], ShardFiles())
    assert isinstance(bad, SampleError)
    assert isinstance(good, RawSample)
    assert isinstance(other, RawSample)
    with pytest.raises(SampleError, match="crc32"):
        read_sample(damaged, 1, ShardFiles())


def test_a_read_that_was_wrong_once_is_made_again_and_logged(
    shard: ShardIndex, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, reads, pread = read_sample(shard, 3, ShardFiles()), [], os.pread

    def wrong_once(descriptor: int, length: int, offset: int) -> bytes:
        reads.append(offset)
        content = bytearray(pread(descriptor, length, offset))
        content[-1] ^= len(reads) == 1
        return bytes(content)

    monkeypatch.setattr(os, "pread", wrong_once)
    files = ShardFiles()
    assert read_sample(shard, 3, files) == expected
    assert len(reads) == 2
    assert files.report()["retries"] == 1
    assert "the crc was wrong on the first read and right on the second" in caplog.text


def test_a_sample_is_given_up_after_the_second_wrong_read(shard: ShardIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, pread = [], os.pread

    def wrong(descriptor: int, length: int, offset: int) -> bytes:
        reads.append(offset)
        return pread(descriptor, length - 1, offset) + b"?"

    monkeypatch.setattr(os, "pread", wrong)
    with pytest.raises(SampleError, match="crc32"):
        read_sample(shard, 3, ShardFiles())
    assert len(reads) == 2


def test_the_ranks_together_read_the_bytes_of_the_samples_used_once(
    make_config: Callable[..., DataConfig], shard_directories: dict[str, Path]
) -> None:
    config = make_config(max_epochs=1)
    with Loader(config, global_batch_size=4, position_kind="rope") as loader:  # text is measured before we count
        list(loader)
    wanted = read = 0
    used = 0
    indexes = {name: open_index(directory) for name, directory in shard_directories.items()}
    lengths = {
        (name, each.name): each.samples["length"] + 512  # with the header that holds the key
        for name, index in indexes.items()
        for each in index.shards
    }
    for rank in range(4):
        with Loader(config, global_batch_size=4, dp_rank=rank, dp_size=4, position_kind="rope") as loader:
            for batch in loader:
                used += sum(
                    int(lengths[segment.source, segment.shard][segment.sample_index]) for segment in batch.samples
                )
            report = loader.report()["reads"]
            wanted, read = wanted + report["bytes_wanted"], read + report["bytes_read"]
    assert wanted == used > 100_000
    assert used <= read <= 1.02 * used
