# SPDX-License-Identifier: Apache-2.0
"""Tests of paths and addresses: telling them apart, joining, names, and where our own files go."""

from pathlib import Path

import pytest

from mindvl_data.config import StoreConfig
from mindvl_data.errors import DataError
from mindvl_data.shards.location import is_remote, join, name_of, shown, sidecar_path


def test_an_address_has_a_protocol_and_a_path_has_none() -> None:
    assert [is_remote(x) for x in ("s3://b/a", "memory://a", "file:///a")] == [True, True, True]
    assert [is_remote(x) for x in (Path("a"), "a/b.tar", "/a", Path("s3://b/a"))] == [False] * 4


def test_joining_and_names_work_the_same_for_both() -> None:
    assert join("s3://b/photos/", "0.tar") == join("s3://b/photos", "0.tar") == "s3://b/photos/0.tar"
    assert join(Path("photos"), "0.tar") == join("photos", "0.tar") == Path("photos/0.tar")
    assert name_of("s3://b/photos/0.tar") == name_of(Path("photos/0.tar")) == "0.tar"


def test_our_files_lie_beside_a_local_shard_and_in_the_cache_for_a_remote_one(tmp_path: Path) -> None:
    store = StoreConfig(cache=tmp_path / "cache")
    assert sidecar_path(Path("photos/0.tar"), "0.len", store) == Path("photos/0.len")
    near, again = (sidecar_path(f"s3://b/photos/{n}.tar", "0.len", store) for n in (0, 1))
    other = sidecar_path("s3://b/scans/0.tar", "0.len", store)
    assert near == again != other
    assert near.is_relative_to(tmp_path / "cache")
    assert near.parent.is_dir()


def test_a_remote_shard_without_a_usable_cache_is_refused_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for store in (None, StoreConfig()):
        with pytest.raises(DataError, match=r"s3://b/photos: .* Set store\.cache"):
            sidecar_path("s3://b/photos/0.tar", "0.len", store)
    with pytest.raises(DataError, match=r"Correct store\.cache"):
        sidecar_path("s3://b/photos/0.tar", "0.len", StoreConfig(cache=tmp_path / "file"))


def test_a_log_shows_an_address_without_its_secrets() -> None:
    assert shown("s3://me:pa55@b/a.tar?token=pa55") == "s3://***@b/a.tar?token=***"
    assert shown(Path("photos/0.tar")) == "photos/0.tar"
