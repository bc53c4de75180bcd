# SPDX-License-Identifier: Apache-2.0
"""Runs of tokens and images of benchmark items against a search by hand."""

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mindvl_data.curation.contamination.benchmarks import BenchmarkItem
from mindvl_data.curation.contamination.table import (
    MAX_ITEMS,
    BenchmarkTable,
    build_table,
    image_hashes,
    run_hashes,
)
from mindvl_data.errors import DataError

QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # processors of CI are shared


def _item(name: str, *texts: str, images: tuple[bytes, ...] = ()) -> BenchmarkItem:
    return BenchmarkItem(name=name, texts=texts, images=images)


@QUIET
@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12))
def test_the_runs_found_are_those_that_both_texts_have(benchmark: list[str], text: list[str]) -> None:
    table = build_table([_item("x", " ".join(benchmark))], num_tokens=3, method="phash")
    runs = {tuple(benchmark[start : start + 3]) for start in range(len(benchmark) - 2)}
    expected = [start for start in range(len(text) - 2) if tuple(text[start : start + 3]) in runs]
    assert table.find_runs(run_hashes(text, 3))[0].tolist() == expected


def test_runs_of_many_items_are_templates() -> None:
    items = [_item(str(number), "answer with one word", f"what is number n{number}") for number in range(MAX_ITEMS + 1)]
    table = build_table(items, num_tokens=4, method="phash")
    assert table.find_runs(run_hashes(["answer", "with", "one", "word"], 4))[0].tolist() == []
    assert table.find_runs(run_hashes(["what", "is", "number", "n3"], 4))[1].tolist() == [3]
    assert len(build_table(items[:-1], num_tokens=4, method="phash").runs) == MAX_ITEMS + 1


def _noise(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (32, 32, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def test_the_nearest_image_within_the_radius_is_found(tmp_path: Path) -> None:
    items = [_item("a", images=(_noise(1),)), _item("b", "word", images=(_noise(2), _noise(3)))]
    built = build_table(items, num_tokens=13, method="phash")
    built.save(tmp_path / "table.npz")
    table = BenchmarkTable.load(tmp_path / "table.npz")
    (value,) = image_hashes((_noise(3),), "phash", "x")
    assert table.find_image(value, 0) == (1, 0)
    assert table.find_image(value ^ 0b1011, 3) == (1, 3)
    assert table.find_image(value ^ 0b1011, 2) is None
    assert (table.names, table.excerpts) == (["a", "b"], ["", "word"])


def test_an_empty_table_finds_nothing() -> None:
    table = build_table([], num_tokens=13, method="phash")
    assert table.find_image(0, 16) is None
    assert table.find_runs(run_hashes(["a"] * 13, 13))[0].tolist() == []


def test_a_damaged_image_of_a_benchmark_is_refused() -> None:
    with pytest.raises(DataError, match=r"bench row 4: .*\. Copy the benchmark again\."):
        image_hashes((b"no image",), "phash", "bench row 4")
