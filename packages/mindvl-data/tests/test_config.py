# SPDX-License-Identifier: Apache-2.0
"""Config: values that cannot work are refused when they are written down."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindvl_data import DataConfig, ImageConfig, PackingConfig, SourceConfig, StoreConfig

SOURCE = SourceConfig(name="a", path=Path("a"))


def make(**changes: Any) -> DataConfig:
    settings: dict[str, Any] = {
        "sources": (SOURCE,),
        "tokenizer": Path("t"),
        "packing": PackingConfig(seq_length=64),
    }
    return DataConfig(**(settings | changes))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ImageConfig(min_pixels=5000, max_pixels=4000), "allow no image size"),
        (lambda: PackingConfig(seq_length=100), "Use 96"),
        (lambda: PackingConfig(seq_length=64, buffer_size=0), "buffer_size: must be between 1 and 65536, got 0"),
        (lambda: PackingConfig(seq_length=64, max_patches=-1), "max_patches: .* got -1"),
        (lambda: SourceConfig(name="a", path=Path("a"), weight=0), "source 'a': weight must be positive, got 0"),
        (lambda: SourceConfig(name="a", path=Path("a"), max_epochs=0), "max_epochs: .* got 0"),
        (lambda: make(sources=()), "sources: the list is empty"),
        (lambda: make(sources=(SOURCE, SOURCE)), r"\['a'\] are used twice"),
        (lambda: make(text_share=1.5), "text_share: must be between 0.0 and 1.0, got 1.5"),
        (lambda: make(num_threads=-1), "num_threads: .* got -1"),
        (lambda: make(sources=(replace(SOURCE, max_pixels=100),)), "source 'a': min_pixels, max_pixels: 3136 and 100"),
        (lambda: make(sources=(replace(SOURCE, min_pixels=2_000_000),)), "source 'a': min_pixels, max_pixels: 2000000"),
    ],
)
def test_a_value_that_cannot_work_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_sizes_follow_from_the_patch() -> None:
    assert ImageConfig().multiple == 28
    assert ImageConfig().patch_dim == 588


def test_directories_and_logs_may_be_written_as_text() -> None:
    config = make(tokenizer="t", audit_log="a.jsonl", quarantine_log="q.jsonl", store=StoreConfig(cache="c"))  # type: ignore[arg-type]
    found = (config.tokenizer, config.audit_log, config.quarantine_log, config.store.cache)
    assert found == (Path("t"), Path("a.jsonl"), Path("q.jsonl"), Path("c"))
    assert make().audit_log is None
