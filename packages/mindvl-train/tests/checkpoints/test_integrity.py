# SPDX-License-Identifier: Apache-2.0
"""What was written is compared with what is there; test_checkpoints.py does so on real ones."""

import json
from pathlib import Path

import pytest

from mindvl_train.checkpoints import integrity
from mindvl_train.checkpoints.integrity import find_damage, seal, write_json


def test_a_sealed_directory_has_no_damage_until_a_file_changes(tmp_path: Path) -> None:
    (tmp_path / "tensors").mkdir()
    large = tmp_path / "tensors" / "__0_0.distcp"
    large.write_bytes(b"12345")
    write_json(tmp_path / "ledger.json", {"step": 1})
    seal(tmp_path)
    assert find_damage(tmp_path) is None
    assert set(json.loads((tmp_path / "files.json").read_text())) == {"ledger.json", "tensors/__0_0.distcp"}
    large.write_bytes(b"54321")  # its boxes have checksums of their own
    assert find_damage(tmp_path) is None
    large.write_bytes(b"1234")
    assert find_damage(tmp_path) == "tensors/__0_0.distcp has 4 bytes, but 5 were written"
    large.write_bytes(b"123456")
    assert find_damage(tmp_path) == "tensors/__0_0.distcp has 6 bytes, but 5 were written"
    large.unlink()
    assert find_damage(tmp_path) == "tensors/__0_0.distcp is missing"
    large.write_bytes(b"12345")
    write_json(tmp_path / "ledger.json", {"step": 2})
    assert find_damage(tmp_path) == "ledger.json has a wrong checksum"
    (tmp_path / "files.json").write_text("[]")
    assert find_damage(tmp_path) == "files.json does not list ledger.json"
    (tmp_path / "files.json").write_text("7")
    assert "files.json cannot be read" in str(find_damage(tmp_path))


@pytest.mark.parametrize("name", ["/dev/zero", "../other", "tensors/../../other"])
def test_only_files_of_the_checkpoint_are_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "files.json").write_text(json.dumps({name: {"bytes": 0, "crc32": 0}}))
    assert find_damage(tmp_path) == f"files.json lists {name}, which is outside the checkpoint"


def test_files_and_directories_are_on_disk_when_a_checkpoint_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(integrity, "sync", synced.append)
    (tmp_path / "tensors").mkdir()
    (tmp_path / "tensors" / "__0_0.distcp").write_bytes(b"12345")  # synced by its writer
    write_json(tmp_path / "ledger.json", {"step": 1})
    seal(tmp_path)
    assert set(synced) == {tmp_path, *(tmp_path / name for name in ("tensors", "ledger.json", "files.json"))}
