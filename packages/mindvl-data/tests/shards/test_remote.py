# SPDX-License-Identifier: Apache-2.0
"""Tests of reading from object stores: faults of a server, refusals, a real S3 server, a whole run from it."""

import hashlib
import importlib
import json
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from mindvl_data import DataConfig, Loader, SourceConfig, StoreConfig
from mindvl_data.errors import DataError, SampleError
from mindvl_data.shards import remote
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import open_index
from mindvl_data.shards.reading import read_samples
from mindvl_data.shards.remote import RemoteStore, fetch_sidecar, local_copy

pytestmark = pytest.mark.slow

CONTENT = random.Random(0).randbytes(5000)


def counted(**settings: Any) -> tuple[RemoteStore, Counter[str]]:
    counts: Counter[str] = Counter()
    return RemoteStore(StoreConfig(**settings), lambda what, amount: counts.update({what: amount})), counts


@pytest.mark.parametrize("fault", ["500", "503", "429", "drop", "short", "wrong-range"])
def test_a_passing_fault_is_survived_and_counted(http: Any, waits: list[float], fault: str) -> None:
    http.objects["/a.tar"], http.faults = CONTENT, [fault, fault]
    store, counts = counted()
    assert store.read(f"{http.address}/a.tar", 100, 300) == CONTENT[100:400]
    assert http.ranges == ["bytes=100-399"] * 3
    assert (counts["requests"], counts["retries"]) == (3, 2)
    assert 0.1 <= waits[0] <= 0.2 <= waits[1] <= 0.4


def test_a_lasting_fault_ends_after_the_retries_with_address_and_reason(http: Any, waits: list[float]) -> None:
    http.objects["/a.tar"], http.faults = CONTENT, ["503"] * 9
    store, counts = counted(retries=3)
    with pytest.raises(DataError, match=r"a\.tar at byte 7: 4 attempts .*503.*Check the network"):
        store.read(f"{http.address}/a.tar", 7, 5)
    assert counts["retries"] == 3
    assert len(waits) == 3


def test_neither_error_nor_log_shows_the_password_of_an_address(
    http: Any, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    http.objects["/a.tar?sig=pa55word"], http.faults = CONTENT, ["503"] * 9
    address = http.address.replace("//", "//me:pa55word@") + "/a.tar?sig=pa55word"
    with pytest.raises(DataError, match=r"//\*\*\*@.*a\.tar\?sig=\*\*\* at byte 7") as error:
        counted(retries=1)[0].read(address, 7, 5)
    assert "pa55word" not in str(error.value)
    assert caplog.messages
    assert all("pa55word" not in message for message in caplog.messages)


def test_a_slow_answer_is_given_up_after_the_time_limit(http: Any, waits: list[float]) -> None:
    http.objects["/a.tar"], http.faults = CONTENT, ["slow"]
    store, counts = counted(timeout_s=0.3)
    assert store.read(f"{http.address}/a.tar", 0, 9) == CONTENT[:9]
    assert counts["retries"] >= 1  # on a busy machine another answer may be late too


@pytest.mark.parametrize(
    ("status", "message"),
    [("404", "does not exist"), ("403", "denies access"), ("401", "options.http"), ("400", "400")],
)
def test_a_refusal_is_not_retried(http: Any, waits: list[float], status: str, message: str) -> None:
    http.objects["/a.tar"], http.faults = CONTENT, [status]
    store, counts = counted()
    with pytest.raises(DataError, match=message):
        store.read(f"{http.address}/a.tar", 0, 9)
    assert (counts["requests"], waits) == (1, [])


def test_a_server_that_knows_no_ranges_is_refused_at_once(http: Any, waits: list[float]) -> None:
    http.objects["/a.tar"], http.faults = CONTENT, ["whole"]
    store, counts = counted()
    with pytest.raises(DataError, match="status 200, not 206"):
        store.read(f"{http.address}/a.tar", 0, 9)
    assert (counts["requests"], counts["bytes_read"]) == (1, 0)


def test_a_shard_that_shrank_is_named_as_changed(http: Any, waits: list[float]) -> None:
    http.objects["/a.tar"] = CONTENT
    for offset, there in ((4990, 10), (6000, 0)):
        with pytest.raises(DataError, match=rf"expected 20 bytes, got {there}; .*upload it again"):
            counted(retries=1)[0].read(f"{http.address}/a.tar", offset, 20)


def test_long_ranges_and_whole_objects_are_fetched_in_parts(http: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 1000)
    http.objects["/a"] = CONTENT
    assert counted()[0].read(f"{http.address}/a", 10, 2500) == CONTENT[10:2510]
    assert sorted(http.ranges) == ["bytes=10-1009", "bytes=1010-2009", "bytes=2010-2509"]
    assert counted()[0].read_whole(f"{http.address}/a") == CONTENT  # a multiple of a part: the end is found by asking


def test_several_spans_are_asked_for_at_once_and_come_back_in_order(http: Any) -> None:
    http.objects["/a"], http.faults = CONTENT, ["slow", "release"]  # the first answer waits for the second request
    spans = [(3000, 4000), (0, 10), (20, 20), (500, 900)]
    store, counts = counted()
    assert store.read_many(f"{http.address}/a", spans) == [CONTENT[start:end] for start, end in spans]
    assert (counts["requests"], counts["retries"]) == (3, 0)


def test_an_error_in_one_of_several_spans_reaches_the_caller(http: Any, waits: list[float]) -> None:
    http.objects["/a"], http.faults = CONTENT, ["403"]
    with pytest.raises(DataError, match="denies access"):
        counted()[0].read_many(f"{http.address}/a", [(0, 10), (100, 110), (200, 210)])


def test_a_file_uploaded_beside_a_shard_is_fetched_once_and_a_missing_one_asked_for_once(
    http: Any, tmp_path: Path
) -> None:
    store, shard = StoreConfig(cache=tmp_path), f"{http.address}/f/0.tar"
    http.objects["/f/0.len"] = CONTENT
    for _ in range(2):
        assert fetch_sidecar(shard, "0.len", store).read_bytes() == CONTENT
        assert not fetch_sidecar(shard, "1.len", store).exists()
    assert len(http.ranges) == 2
    assert fetch_sidecar(tmp_path / "0.tar", "0.len", None) == tmp_path / "0.len"


def test_headers_of_the_options_reach_the_server_and_no_other_protocol(http: Any) -> None:
    http.objects["/a"] = CONTENT
    options = {"http": {"headers": {"Authorization": "Bearer t"}}, "s3": {"secret": "never"}}
    counted(options=options)[0].read(f"{http.address}/a", 0, 4)
    assert http.headers[0]["Authorization"] == "Bearer t"
    assert "never" not in str(http.headers) + repr(StoreConfig(options=options))


def test_many_threads_read_at_once(http: Any) -> None:
    http.objects["/a"] = CONTENT
    store, wrong = counted()[0], []

    def read(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(10):
            offset = draw.randrange(4000)
            if store.read(f"{http.address}/a", offset, 1000) != CONTENT[offset : offset + 1000]:
                wrong.append(offset)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_process_connects_anew(http: Any) -> None:
    http.objects["/a"] = CONTENT
    store = counted()[0]
    store.read(f"{http.address}/a", 0, 4)
    child = os.fork()
    if not child:
        os._exit(0 if store.read(f"{http.address}/a", 10, 4) == CONTENT[10:14] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    with pytest.raises(DataError, match=r"s3://bucket/a\.tar: .* Install mindvl-data\[s3\]\."):
        counted(options={"s3": {"key": "none yet"}})[0].read("s3://bucket/a.tar", 0, 1)


def test_unknown_protocols_and_options_are_named() -> None:
    with pytest.raises(DataError, match=r"nosuch://a/b: nosuch:// cannot be opened"):
        counted()[0].read("nosuch://a/b", 0, 1)
    with pytest.raises(DataError, match=r"options\.s3"):
        counted(options={"s3": {"key": "a", "username": "b"}})[0].read("s3://bucket/a", 0, 1)


def test_memory_and_file_addresses_work_too(tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe_file("/directory/a.tar", CONTENT)
    (tmp_path / "a.tar").write_bytes(CONTENT)
    for address in ("memory://directory/a.tar", f"file://{tmp_path}/a.tar"):
        assert counted()[0].read(address, 5, 7) == CONTENT[5:12]
        assert counted()[0].read_whole(address) == CONTENT
        with pytest.raises(DataError, match="the object does not exist"):
            counted()[0].read(f"{address}.not", 0, 1)


def test_the_copy_of_an_index_is_checked_healed_and_fetched_once(http: Any, tmp_path: Path) -> None:
    http.objects["/f/0.idx"] = CONTENT
    store, digest = StoreConfig(cache=tmp_path), hashlib.sha256(CONTENT).hexdigest()
    path = local_copy(f"{http.address}/f/0.idx", digest, store)
    assert path.read_bytes() == CONTENT
    assert local_copy(f"{http.address}/f/0.idx", digest, store) == path
    assert len(http.ranges) == 1
    path.write_bytes(CONTENT[:-1] + b"!")
    assert local_copy(f"{http.address}/f/0.idx", digest, store).read_bytes() == CONTENT
    http.objects["/f/0.idx"] = b"another"
    path.unlink()
    with pytest.raises(DataError, match="differs from the one in the manifest"):
        local_copy(f"{http.address}/f/0.idx", digest, store)


def test_a_manifest_is_fetched_at_every_start_and_an_old_one_never_used(
    http: Any, tmp_path: Path, waits: list[float]
) -> None:
    store, address = StoreConfig(cache=tmp_path, retries=1), f"{http.address}/f/manifest.json"
    for content in (b"old", b"new"):
        http.objects["/f/manifest.json"] = content
        assert local_copy(address, None, store).read_bytes() == content
    http.faults = ["503"] * 2
    with pytest.raises(DataError, match="2 attempts to read from the store failed"):
        local_copy(address, None, store)
    with pytest.raises(DataError, match=r"Set store\.cache"):
        local_copy(address, None, StoreConfig())


def test_s3_ranges_refusals_and_ends(s3: Any, waits: list[float]) -> None:
    s3.client.put_object(Bucket="bucket", Key="plain/a b+c.tar", Body=CONTENT)
    store, counts = counted(options={"s3": s3.options}, retries=1)
    assert store.read("s3://bucket/plain/a b+c.tar", 100, 50) == CONTENT[100:150]
    assert store.read_whole("s3://bucket/plain/a b+c.tar") == CONTENT
    assert (counts["requests"], counts["bytes_read"]) == (2, 5050)
    for address in ("s3://bucket/plain/none.tar", "s3://no-such-bucket/a.tar"):
        with pytest.raises(DataError, match="the object does not exist"):
            store.read(address, 0, 1)
    for offset, there in ((4990, 10), (6000, 0)):
        with pytest.raises(DataError, match=f"expected 20 bytes, got {there}"):
            store.read("s3://bucket/plain/a b+c.tar", offset, 20)
    no_server = {**s3.options, "endpoint_url": "http://127.0.0.1:9"}
    with pytest.raises(DataError, match="2 attempts to read from the store failed"):
        counted(options={"s3": no_server}, retries=1)[0].read("s3://bucket/a.tar", 0, 1)


@pytest.fixture
def remote_config(
    s3: Any, tmp_path: Path, shard_directories: dict[str, Path], make_config: Callable[..., DataConfig]
) -> DataConfig:
    """The shared sources, uploaded."""
    sources = [
        SourceConfig(name=name, path=s3.upload(directory, f"{tmp_path.name}/{name}"), max_epochs=1)
        for name, directory in shard_directories.items()
    ]
    store = StoreConfig(cache=tmp_path / "cache", retries=1, options={"s3": s3.options})
    return make_config(sources=tuple(sources), store=store)


def run(config: DataConfig, rows: int = 2) -> tuple[list[Any], dict[str, int]]:
    with Loader(config, global_batch_size=rows, position_kind="rope") as loader:
        batches = list(loader)
        return batches, loader.report()["reads"]


def test_batches_from_s3_equal_local_ones_and_the_second_run_fetches_nothing(
    remote_config: DataConfig, make_config: Callable[..., DataConfig]
) -> None:
    local, local_bytes = run(make_config(max_epochs=1))
    first, fetched = run(remote_config)
    assert_equal_batches(first, local)
    assert 0 < fetched["bytes_wanted"] <= fetched["bytes_read"] + fetched["cache_bytes"]
    assert fetched["bytes_read"] <= 1.02 * fetched["bytes_wanted"]
    assert local_bytes["bytes_read"] <= 1.02 * local_bytes["bytes_wanted"]
    second, kept = run(remote_config)
    assert_equal_batches(second, local)
    assert (kept["bytes_read"], kept["requests"]) == (0, 0)
    assert kept["cache_bytes"] == kept["bytes_wanted"] > 0


def test_lengths_measured_before_the_upload_spare_measuring_from_the_store(
    s3: Any, tmp_path: Path, shard_directories: dict[str, Path], make_config: Callable[..., DataConfig]
) -> None:
    run(make_config(max_epochs=1))  # leaves the lengths beside the shards
    _, near = run(make_config(max_epochs=1))
    sources = tuple(
        SourceConfig(name=name, path=s3.upload(directory, f"{tmp_path.name}/{name}"), max_epochs=1)
        for name, directory in shard_directories.items()
    )
    _, far = run(make_config(sources=sources, store=StoreConfig(cache=tmp_path / "c", options={"s3": s3.options})))
    assert far["bytes_wanted"] == near["bytes_wanted"]
    assert far["bytes_read"] == near["bytes_read"]


def test_a_run_continues_without_its_store_as_far_as_the_cache_reaches(
    http: Any,
    waits: list[float],
    tmp_path: Path,
    shard_directories: dict[str, Path],
    make_config: Callable[..., DataConfig],
) -> None:
    run(make_config(max_epochs=1))
    for directory in shard_directories.values():
        http.objects |= {f"/{directory.name}/{path.name}": path.read_bytes() for path in directory.iterdir()}
    sources = tuple(SourceConfig(name=n, path=f"{http.address}/{n}", max_epochs=1, first=20) for n in shard_directories)
    config = make_config(sources=sources, store=StoreConfig(cache=tmp_path, retries=1), num_threads=0, prefetch_packs=1)
    whole, _ = run(config, rows=1)
    with Loader(config, global_batch_size=1, position_kind="rope") as loader:
        first = next(loader)
        http.faults = ["503"] * 100_000
        assert_equal_batches([first, *loader], whole)
    for path in (tmp_path / "ranges").glob("*/*"):
        path.unlink()
    http.faults = []
    with Loader(config, global_batch_size=1, position_kind="rope") as loader:
        next(loader)
        http.faults = ["503"] * 100_000
        with pytest.raises(DataError, match=rf"{http.address}.*2 attempts .*503.*Check the network"):
            list(loader)


def test_a_damaged_cache_is_healed_and_a_store_that_is_down_stops_only_what_is_not_kept(
    remote_config: DataConfig, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = remote_config.store
    assert store.cache is not None
    shard = open_index(remote_config.sources[0].path, store=store).shards[0]
    whole = read_samples(shard, range(4), ShardFiles(store))
    for path in (store.cache / "ranges").glob("*/*"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    files = ShardFiles(store)
    assert read_samples(shard, range(4), files) == whole
    assert files.report()["bytes_read"] >= files.report()["bytes_wanted"] > 0
    down = replace(store, options={"s3": store.options["s3"] | {"endpoint_url": "http://127.0.0.1:9"}})
    files = ShardFiles(down)
    assert read_samples(shard, [2, 0, 3, 1], files) == [whole[2], whole[0], whole[3], whole[1]]
    with pytest.raises(DataError, match=r"s3://bucket/.*2 attempts .*the run resumes from its last checkpoint"):
        read_samples(shard, [5], files)


def test_ranges_kept_from_an_older_shard_are_fetched_again(remote_config: DataConfig) -> None:
    store = remote_config.store
    shard = open_index(remote_config.sources[0].path, store=store).shards[0]
    files = ShardFiles(store)
    (right,) = read_samples(shard, [1], files)
    start, length = int(shard.samples["offset"][1]) - 512, int(shard.samples["length"][1]) + 512
    files._cache.put(str(shard.path), start, bytes(length))  # type: ignore[union-attr]
    assert read_samples(shard, [1], files) == [right]
    wrong = replace(shard, samples=shard.samples.copy())
    wrong.samples["crc"][1] ^= 1  # now the store itself holds something else than was indexed
    assert isinstance(read_samples(wrong, [1], files)[0], SampleError)


def test_an_index_from_a_store_equals_the_local_one(
    remote_config: DataConfig, shard_directories: dict[str, Path]
) -> None:
    far = open_index(remote_config.sources[0].path, store=remote_config.store)
    near = open_index(shard_directories["images"])
    assert far.identity == near.identity
    assert [shard.name for shard in far.shards] == [shard.name for shard in near.shards]
    assert json.dumps(far.shards[1].members.tolist()) == json.dumps(near.shards[1].members.tolist())


def assert_equal_batches(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected) > 5
    for ours, theirs in zip(found, expected, strict=True):
        for field in fields(ours):
            a, b = getattr(ours, field.name), getattr(theirs, field.name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name
