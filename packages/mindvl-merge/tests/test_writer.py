# SPDX-License-Identifier: Apache-2.0
"""Files are written at known places in any order, and a journal is believed only if it fits."""

import os
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from mindvl_merge.headers import TensorInfo
from mindvl_merge.writer import JOURNAL_NAME, DirectoryWriter, has_finished_tensors, header_bytes

INFOS = [
    TensorInfo(name="b", shape=(3, 2), dtype=np.dtype(ml_dtypes.bfloat16), file="", offset=0),
    TensorInfo(name="a", shape=(), dtype=np.dtype(np.float32), file="", offset=0),
    TensorInfo(name="empty", shape=(0, 4), dtype=np.dtype(np.float32), file="", offset=0),
]


def _writer(path, inputs="x", max_shard_bytes=1000):
    return DirectoryWriter(path, INFOS, max_shard_bytes=max_shard_bytes, inputs=inputs)


@pytest.mark.parametrize(("max_shard_bytes", "files"), [(1000, 1), (12, 2)])
def test_blocks_in_any_order_are_read_by_the_safetensors_library(tmp_path, max_shard_bytes, files):
    with _writer(tmp_path, max_shard_bytes=max_shard_bytes) as writer:
        writer.write("a", 0, np.array([7.0], np.float32))
        writer.write("b", 4, np.array([5.0, 6.0], ml_dtypes.bfloat16))
        writer.write("b", 0, np.array([1.0, 2.0, 3.0, 4.0], ml_dtypes.bfloat16))
        writer.commit({"a": {"digest": "1"}, "b": {"digest": "2"}, "empty": {"digest": "3"}})
        writer.finish()
    paths = sorted(tmp_path.glob("*.safetensors"))
    assert len(paths) == files
    found = {}
    for path in paths:
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found["b"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert (found["a"].item(), list(found["empty"].shape)) == (7, [0, 4])
    assert not (tmp_path / JOURNAL_NAME).exists()
    assert (tmp_path / "model.safetensors.index.json").exists() == (files > 1)


def test_a_journal_continues_only_the_same_inputs_with_whole_files(tmp_path):
    with _writer(tmp_path) as writer:
        assert not has_finished_tensors(tmp_path)
        writer.commit({"a": {"digest": "1"}})
    assert has_finished_tensors(tmp_path)
    with open(tmp_path / JOURNAL_NAME, "a", encoding="utf-8") as journal:
        journal.write('{"tensor": "b", "dig')  # killed while writing
    with _writer(tmp_path) as writer:
        assert writer.finished == {"a": {"digest": "1"}}
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with _writer(tmp_path) as writer:
        assert writer.finished == {}
        writer.commit({"a": {"digest": "1"}})
    with _writer(tmp_path, inputs="y") as writer:
        assert writer.finished == {}


@pytest.mark.skipif(sys.platform != "linux", reason="names of descriptors are read from /proc")
def test_a_commit_syncs_all_files_once_and_then_those_of_its_tensors(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        "os.fdatasync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")[-24:])
    )
    first, second = "00001-of-00002.safetensors"[-24:], "00002-of-00002.safetensors"[-24:]
    with _writer(tmp_path, max_shard_bytes=12) as writer:
        writer.commit({"b": {"digest": "1"}})
        assert synced == [first, second]
        writer.commit({"a": {"digest": "2"}})
        assert synced == [first, second, second]


@pytest.mark.parametrize("length", range(8))
def test_values_begin_at_a_multiple_of_eight_bytes(length):
    info = TensorInfo(name="a" * (length + 1), shape=(1,), dtype=np.dtype(np.float32), file="", offset=0)
    content = header_bytes([info])
    assert int.from_bytes(content[:8], "little") + 8 == len(content)
    assert len(content) % 8 == 0
