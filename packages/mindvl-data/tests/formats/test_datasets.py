# SPDX-License-Identifier: Apache-2.0
"""Data sets that the Hugging Face datasets library saved itself."""

from pathlib import Path

import pytest
from PIL import Image

from mindvl_data.errors import DataError
from mindvl_data.formats.datasets import read_datasets
from mindvl_data.formats.record import SourceRecord


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    import datasets

    images = [Image.new("RGB", (8, 8), (value, 0, 0)) for value in (1, 2, 3)]
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    whole = datasets.Dataset.from_dict({"image": images, "caption": ["a", "b", "c"]}, features=features)
    whole.save_to_disk(tmp_path / "whole", num_shards=2)
    datasets.DatasetDict({"train": whole}).save_to_disk(tmp_path / "splits")
    whole.select([0, 2]).save_to_disk(tmp_path / "chosen")
    return tmp_path


@pytest.mark.slow
def test_images_and_captions_of_every_file_come_in_order(saved: Path) -> None:
    found = read_datasets(saved / "whole", None)
    records = [record for record in found.records if isinstance(record, SourceRecord)]
    assert found.total == 3
    assert [record.body["content"][1] for record in records] == ["a", "b", "c"]
    assert all(isinstance(record.media[0], bytes) for record in records)
    assert str(records[2].origin).endswith("row 1")  # of the second file


def test_the_split_must_be_named_and_chosen_rows_are_kept_or_refused(saved: Path) -> None:
    with pytest.raises(DataError, match="holds the splits train"):
        read_datasets(saved / "splits", None)
    assert read_datasets(saved / "splits" / "train", None).total == 3
    found = read_datasets(saved / "chosen", None)
    assert [record.body["content"][1] for record in found.records if isinstance(record, SourceRecord)] == ["a", "c"]


@pytest.mark.parametrize("state", ["{", '{"_data_files": [{"filename": "../a.arrow"}]}', '{"other": 1}'])
def test_a_damaged_state_is_refused(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(DataError, match=r"state\.json"):
        read_datasets(tmp_path, None)


def test_a_damaged_file_is_named(saved: Path) -> None:
    file = next((saved / "whole").glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match=file.name):
        list(read_datasets(saved / "whole", None).records)
