# SPDX-License-Identifier: Apache-2.0
"""Data sets of the hub are read from its cache, which the tests write; their revision is in the manifest."""

import io
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from mindvl_data import DataError, index_directory, write_shards
from mindvl_data.formats.hub import open_dataset

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _rows(path: Path, texts: list[str]) -> None:
    file = io.BytesIO()
    Image.new("RGB", (56, 56), "red").save(file, "PNG")
    images = [{"bytes": file.getvalue(), "path": None} for _ in texts]
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"image": images, "caption": texts}), path)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache of huggingface_hub with two splits of org/photos, and no network."""
    root = tmp_path / "cache"
    dataset = root / "datasets--org--photos"
    snapshot = dataset / "snapshots" / COMMIT
    _rows(snapshot / "data" / "train-00000-of-00002.parquet", ["a cat"])
    _rows(snapshot / "data" / "train-00001-of-00002.parquet", ["a dog"])
    _rows(snapshot / "data" / "test-00000-of-00001.parquet", ["a bird"])
    (dataset / "refs").mkdir()
    (dataset / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return root


def test_one_split_is_written_and_its_revision_is_in_the_manifest(cache, tmp_path):
    out = tmp_path / "shards"
    assert write_shards("hf://datasets/org/photos/data/train-*.parquet", out).samples == 2
    index_directory(out)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["origin"] == {"dataset": "org/photos", "revision": COMMIT}
    assert b"a bird" not in b"".join(path.read_bytes() for path in out.glob("*.tar"))


@pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT}"])
def test_a_branch_and_no_revision_are_resolved_to_the_commit(cache, revision):
    found = open_dataset(f"hf://datasets/org/photos{revision}/data")
    assert (found.id, found.revision) == ("org/photos", COMMIT)
    assert found.path == cache / "datasets--org--photos" / "snapshots" / COMMIT / "data"


def test_splits_are_not_mixed(cache, tmp_path):
    with pytest.raises(DataError, match=r"has files of the splits test, train\. .*/data/test\*\.parquet"):
        write_shards("hf://datasets/org/photos", tmp_path / "shards")


def test_shards_of_other_sources_have_no_origin(cache, tmp_path):
    _rows(tmp_path / "own.parquet", ["a cow"])
    out = tmp_path / "shards"
    write_shards(tmp_path / "own.parquet", out)
    assert "origin" not in index_directory(out)


def test_a_data_set_that_is_not_in_the_cache_is_refused_with_what_to_type(cache):
    with pytest.raises(DataError, match="run `hf download --repo-type dataset org/missing`"):
        open_dataset("hf://datasets/org/missing")


@pytest.mark.parametrize("address", ["hf://org/photos", "hf://datasets/photos", "hf://datasets/org/photos/../other"])
def test_other_addresses_are_refused(address):
    with pytest.raises(DataError, match="is not the address of a data set"):
        open_dataset(address)
