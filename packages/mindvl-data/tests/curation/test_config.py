# SPDX-License-Identifier: Apache-2.0
"""Tests of mindvl_data.curation.config."""

import pytest

from mindvl_data.curation.config import InputConfig, LimitsConfig, OutputConfig


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("data/photos/", "photos"),
        ("a/b.jsonl", "b"),
        ("https://host/x-{000..009}.tar?token=secret", "x-{000"),
        ("/", "input"),
    ],
)
def test_the_name_of_an_input_comes_from_its_path(path: str, name: str) -> None:
    assert InputConfig(path=path, format="jsonl").shown_name == name


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"^memory_gib: must be greater than 0, got 0\.$"):
        LimitsConfig(memory_gib=0)
    with pytest.raises(ValueError, match=r"^samples_per_shard: must be at least 1, got 0\.$"):
        OutputConfig(samples_per_shard=0)
