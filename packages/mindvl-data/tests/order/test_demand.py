# SPDX-License-Identifier: Apache-2.0
"""Demand: means and the largest sample of a source, found once, the same for everyone."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from mindvl_data import DataConfig, SourceConfig, Tokenizer, index_directory, write_shards
from mindvl_data.order.demand import mixture_demand, source_demand
from mindvl_data.order.sources import SourceIndex
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.sealed import seal

MakeConfig = Callable[..., DataConfig]
MakeSources = Callable[[DataConfig], list[SourceIndex]]


@pytest.fixture
def make_sources(tokenizer: Tokenizer) -> Iterator[MakeSources]:
    files = ShardFiles()
    yield lambda config: [SourceIndex(source, config, tokenizer, files) for source in config.sources]
    files.close()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": "ab " * n}) for n in range(1, 21)))
    write_shards(tmp_path / "text.jsonl", tmp_path / "texts", format="text", samples_per_shard=6)
    index_directory(tmp_path / "texts")
    return tmp_path / "texts"


def everything(source: SourceIndex) -> tuple[np.ndarray, np.ndarray]:
    lengths = [source.lengths(shard) for shard in range(len(source.index.shards))]
    return np.concatenate([pair[0] for pair in lengths]), np.concatenate([pair[1] for pair in lengths])


def test_small_sources_are_looked_at_whole(make_sources: MakeSources, make_config: MakeConfig) -> None:
    config = make_config()
    for source in make_sources(config):
        tokens, patches = everything(source)
        demand = source_demand(source, config)
        assert demand.mean_tokens == tokens.mean()
        assert demand.mean_patches == patches.mean()
        assert demand.largest == patches.max()


def test_the_mixture_weighs_its_sources(make_sources: MakeSources, make_config: MakeConfig) -> None:
    for unit in ("samples", "tokens"):
        config = make_config(weight_unit=unit)
        sources = make_sources(config)
        (tokens_0, patches_0), (tokens_1, _) = (everything(source) for source in sources)
        samples_1 = 3.0 if unit == "samples" else 3 * tokens_0.mean() / tokens_1.mean()  # for one of the other
        tokens = tokens_0.mean() + samples_1 * tokens_1.mean()
        mean, per_token, largest = mixture_demand(sources, [0.25, 0.75], config)
        assert mean == pytest.approx(tokens / (1 + samples_1))
        assert per_token == pytest.approx(patches_0.mean() / tokens)
        assert largest == patches_0.max()


def test_a_subset_has_its_own_demand(make_sources: MakeSources, make_config: MakeConfig, texts: Path) -> None:
    config = make_config(sources=(SourceConfig(name="texts", path=texts, first=3),))
    (source,) = make_sources(config)
    assert source_demand(source, config).mean_tokens == source.lengths(0)[0][:3].mean()


def test_what_was_found_is_kept_and_not_looked_for_again(
    make_sources: MakeSources, make_config: MakeConfig, texts: Path
) -> None:
    config = make_config(sources=(SourceConfig(name="texts", path=texts),))
    found = source_demand(make_sources(config)[0], config)
    (kept,) = texts.glob("demand-*.json")
    kept.write_bytes(seal(asdict(found) | {"tokens": 2 * found.tokens}))
    assert source_demand(make_sources(config)[0], config).mean_tokens == 2 * found.mean_tokens
    for damaged in (b"{broken", b"[]", b"\xff", seal({}), seal({"samples": 1}), b"[" * 100_000, b'{"samples":1}'):
        kept.write_bytes(damaged)
        assert source_demand(make_sources(config)[0], config) == found
    # An edit without a new checksum is damage too: this rank would compute another order than the others.
    kept.write_text(kept.read_text().replace(f'"tokens": {found.tokens}', '"tokens": 77'))
    assert source_demand(make_sources(config)[0], config) == found
    other = replace(config, packing=replace(config.packing, seq_length=16))
    assert source_demand(make_sources(other)[0], other).mean_tokens < found.mean_tokens


def test_a_source_that_was_indexed_again_has_new_averages(
    make_sources: MakeSources, make_config: MakeConfig, texts: Path
) -> None:
    config = make_config(sources=(SourceConfig(name="texts", path=texts),))
    before = source_demand(make_sources(config)[0], config)
    longer = texts.with_name("longer.jsonl")
    longer.write_text("\n".join(json.dumps({"text": "ab " * (n + 20)}) for n in range(20)))  # shards of the same sizes
    shutil.rmtree(texts / "texts", ignore_errors=True)
    write_shards(longer, texts.with_name("other"), format="text", samples_per_shard=6)
    for file in texts.with_name("other").iterdir():
        shutil.copyfile(file, texts / file.name)
    index_directory(texts)
    (source,) = make_sources(config)
    assert source_demand(source, config).tokens == everything(source)[0].sum() > before.tokens


def test_a_directory_that_cannot_be_written_gives_the_same_numbers_and_a_warning(
    make_sources: MakeSources, make_config: MakeConfig, texts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(sources=(SourceConfig(name="texts", path=texts),))
    found = source_demand(make_sources(config)[0], config)
    (kept,) = texts.glob("demand-*.json")
    kept.unlink()
    kept.mkdir()  # nothing can be written under this name, whoever tries
    with caplog.at_level(logging.WARNING):
        assert source_demand(make_sources(config)[0], config) == found
    assert "the averages of source texts cannot be stored" in caplog.text
