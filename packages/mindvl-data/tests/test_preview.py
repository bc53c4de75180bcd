# SPDX-License-Identifier: Apache-2.0
"""Preview: each stage of a sample as data and as a page."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mindvl_data import DataConfig, DataError, Loader, Tokenizer
from mindvl_data.preview import preview_sample, row_page, sample_page


def test_the_stages_of_a_sample(shard_folders: dict[str, Path], tokenizer: Tokenizer) -> None:
    shown = preview_sample(shard_folders["pictures"], key="000000020", tokenizer=tokenizer)
    assert shown.key == "000000020"
    assert shown.shard == "shard-000001.tar"
    assert "messages" in str(shown.as_json("raw")["record"])
    learned = "".join(run.text for run in shown.tokens if run.learned)
    assert learned == shown.sample.messages[1].parts[0].text + "<|im_end|>"  # type: ignore[union-attr]
    placeholders = sum(run.count for run in shown.tokens if run.visual)
    assert placeholders == sum(h * w // 28**2 for _, (h, w) in shown.scales)


def test_the_page_holds_everything_itself(shard_folders: dict[str, Path], tokenizer: Tokenizer) -> None:
    shown = preview_sample(shard_folders["pictures"], tokenizer=tokenizer)
    page = sample_page(shown)
    assert page.count("data:image/png;base64,") == len(shown.raw.media)
    assert 'class="t l"' in page
    assert "<script" not in page


def test_text_on_the_page_is_escaped(shard_folders: dict[str, Path], tokenizer: Tokenizer) -> None:
    shown = preview_sample(shard_folders["text"], tokenizer=tokenizer)
    assert "<|im_end|>" not in sample_page(shown)


def test_a_row_is_shown_with_its_segments(make_config: Callable[..., DataConfig], tokenizer: Tokenizer) -> None:
    with Loader(make_config(), packs_per_step=1, position_kind="rope") as loader:
        batch = next(loader)
    page = row_page(batch, tokenizer)
    assert all(segment.key in page for segment in batch.segments)


def test_an_unknown_key_is_refused(shard_folders: dict[str, Path]) -> None:
    with pytest.raises(DataError, match="key 'x' does not exist"):
        preview_sample(shard_folders["text"], key="x")
