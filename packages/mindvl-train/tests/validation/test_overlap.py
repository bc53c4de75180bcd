# SPDX-License-Identifier: Apache-2.0
"""A shard that is trained on and validated is found, also as a copy under another name."""

import shutil
from pathlib import Path

from mindvl_data import SourceConfig, index_directory
from mindvl_data.config import StoreConfig
from mindvl_train.validation.config import ValidationConfig
from mindvl_train.validation.overlap import overlap


def test_the_same_directory_is_found(sources: tuple[SourceConfig, ...]) -> None:
    found = overlap(sources, ValidationConfig(sources=sources[:1]), StoreConfig())
    assert found is not None
    assert "3 shards are also trained on" in found
    assert "of validation source pages is " in found


def test_a_copy_of_one_shard_in_another_directory_is_found(sources: tuple[SourceConfig, ...], tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    shard = sorted(Path(sources[1].path).glob("*.tar"))[0]
    shutil.copy(shard, copies / "renamed.tar")
    index_directory(copies)
    found = overlap(sources, ValidationConfig(sources=(SourceConfig(name="mixed", path=copies),)), StoreConfig())
    assert found is not None
    assert f"renamed.tar of validation source mixed is {shard.name} of training source photos" in found


def test_held_out_shards_are_accepted(sources: tuple[SourceConfig, ...], held_out: tuple[SourceConfig, ...]) -> None:
    assert overlap(sources, ValidationConfig(sources=held_out), StoreConfig()) is None
