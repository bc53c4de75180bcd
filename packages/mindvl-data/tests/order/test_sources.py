# SPDX-License-Identifier: Apache-2.0
"""Sources: lengths of the packs that are wanted, measured once, little memory however many samples there are."""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mindvl_data import DataConfig, PackingConfig, SourceConfig, Tokenizer, index_directory, write_shards
from mindvl_data.order.data_order import DataOrder
from mindvl_data.order.sources import SourceIndex
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.sealed import seal

MakeConfig = Callable[..., DataConfig]


@pytest.fixture
def files() -> Iterator[ShardFiles]:
    files = ShardFiles()
    yield files
    files.close()


def write_texts(directory: Path, count: int) -> Path:
    """One indexed shard of short texts of different lengths."""
    directory.mkdir()
    lines = [json.dumps({"text": "ab " * (1 + 7 * number % 23)}) for number in range(count)]
    (directory / "text.jsonl").write_text("\n".join(lines))
    write_shards(directory / "text.jsonl", directory / "shards", format="text", samples_per_shard=count)
    index_directory(directory / "shards")
    return directory / "shards"


def test_lengths_of_packs_are_those_of_the_whole_shard(
    make_config: MakeConfig, tokenizer: Tokenizer, files: ShardFiles
) -> None:
    config = make_config()
    source = SourceIndex(config.sources[0], config, tokenizer, files)
    tokens, patches = source.lengths(1)
    packs = np.array([7, 0, 15, 7])
    some_tokens, some_patches = source.lengths_of(1, packs)
    assert some_tokens.tolist() == tokens[packs].tolist()
    assert some_patches.tolist() == patches[packs].tolist()
    assert len(set(tokens.tolist())) > 1


def test_a_shard_is_measured_whole_once_where_that_can_be_kept(
    tmp_path: Path, make_config: MakeConfig, tokenizer: Tokenizer, files: ShardFiles
) -> None:
    directory = write_texts(tmp_path / "texts", 30)
    config = make_config(sources=(SourceConfig(name="texts", path=directory),))
    first = SourceIndex(config.sources[0], config, tokenizer, files).lengths_of(0, np.array([3, 4]))
    kept = list(directory.glob("*.len"))
    assert len(kept) == 1
    (directory / "shard-000000.tar").write_bytes(bytes((directory / "shard-000000.tar").stat().st_size))
    again = SourceIndex(config.sources[0], config, tokenizer, files).lengths_of(0, np.array([3, 4]))
    assert again[0].tolist() == first[0].tolist()  # no sample was read: there is nothing left to read


def test_where_nothing_can_be_kept_only_the_wanted_packs_are_measured(
    tmp_path: Path, make_config: MakeConfig, tokenizer: Tokenizer, files: ShardFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_texts(tmp_path / "texts", 30)
    config = make_config(sources=(SourceConfig(name="texts", path=directory),))
    expected = SourceIndex(config.sources[0], config, tokenizer, files).lengths(0)[0].tolist()
    (kept,) = directory.glob("*.len")
    kept.unlink()
    kept.with_name(kept.name).mkdir()  # nothing can be written under this name, whoever tries
    source = SourceIndex(config.sources[0], config, tokenizer, files)
    assert source.lengths_of(0, np.array([5]))[0].tolist() == [expected[5]]
    content = bytearray((directory / "shard-000000.tar").read_bytes())
    content[int(source.index.shards[0].samples["offset"][9])] ^= 1  # pack 9 cannot be read any more
    (directory / "shard-000000.tar").write_bytes(content)
    assert source.lengths_of(0, np.array([5, 6]))[0].tolist() == expected[5:7]


@pytest.mark.slow
def test_a_million_samples_of_many_sources_take_little_memory(
    tmp_path: Path, make_config: MakeConfig, tokenizer: Tokenizer, files: ShardFiles
) -> None:
    one, num_sources, num_shards = write_texts(tmp_path / "one", 1000), 10, 100
    config = make_config(sources=(SourceConfig(name="one", path=one),), packing=PackingConfig(seq_length=256))
    SourceIndex(config.sources[0], config, tokenizer, files).lengths(0)
    base = tmp_path / "base"
    base.mkdir()
    manifest = json.loads((one / "manifest.json").read_text())
    names = [f"shard-{number:06d}" for number in range(num_shards)]
    for name in names:
        for path in one.glob("shard-000000.*"):
            (base / path.name.replace("shard-000000", name)).symlink_to(path)
    entries = [manifest["shards"][0] | {"name": f"{name}.tar"} for name in names]
    totals = {"samples": 1000 * num_shards, "bytes": num_shards * manifest["bytes"]}
    del manifest["checksum"]
    (base / "manifest.json").write_bytes(seal(manifest | totals | {"shards": entries}))
    directories = [tmp_path / f"source-{number}" for number in range(num_sources)]
    for directory in directories:
        directory.symlink_to(base)
    config = replace(
        config, sources=tuple(SourceConfig(name=directory.name, path=directory) for directory in directories)
    )
    tracemalloc.start()
    try:
        sources = [SourceIndex(source, config, tokenizer, files) for source in config.sources]
        data_order = DataOrder(config, sources, global_batch_size=8)
        for _ in range(4):
            assert data_order.next_step() is not None
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(source.num_samples for source in sources) == 1_000_000
    assert most < 8 << 20  # a table of lengths alone would be as much
    maps = Path("/proc/self/maps").read_text()
    assert maps.count(".idx\n") <= 256
