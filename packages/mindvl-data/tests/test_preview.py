# SPDX-License-Identifier: Apache-2.0
"""Preview: each stage of a sample as data."""

from pathlib import Path

import pytest

from mindvl_data import DataError, ImageConfig, Tokenizer
from mindvl_data.config import SampleRules
from mindvl_data.preview import preview_sample, token_runs


def test_the_stages_of_a_sample(shard_directories: dict[str, Path], tokenizer: Tokenizer) -> None:
    shown = preview_sample(shard_directories["images"], key="000000020", tokenizer=tokenizer)
    assert shown.key == "000000020"
    assert shown.shard == "shard-000001.tar"
    assert "messages" in str(shown.as_json("raw")["record"])
    targets = "".join(run.text for run in shown.tokens if run.in_loss)
    assert targets == shown.sample.messages[1].parts[0].text + "<|im_end|>"  # type: ignore[union-attr]
    placeholders = sum(run.count for run in shown.tokens if run.visual)
    assert placeholders == sum(h * w // 28**2 for _, (h, w) in shown.scales)
    assert sum(run.count for run in shown.tokens) == shown.as_json("tokens")["num_tokens"]
    assert shown.num_cut == 0


def test_without_a_tokenizer_there_are_no_tokens(shard_directories: dict[str, Path]) -> None:
    rules = SampleRules(image=ImageConfig(min_pixels=784, max_pixels=784))
    shown = preview_sample(shard_directories["images"], rules=rules)
    assert shown.tokens == []
    assert all(new == (28, 28) for _, new in shown.scales)


def test_a_character_of_several_tokens_is_decoded_whole_and_bytes_that_are_none_stay_single(
    tokenizer: Tokenizer,
) -> None:
    def ids_of(text: str) -> list[int]:
        return tokenizer.backend.encode(text, add_special_tokens=False).ids

    ids = ids_of("a\u4f60\u201cb")
    assert len(ids) > 4  # the tokenizer of the tests has no token for the Chinese character or the quote
    runs = token_runs(ids, [-100] * len(ids), tokenizer)
    assert [run.text for run in runs] == ["a", "\u4f60", "\u201c", "b"]
    assert sum(run.count for run in runs) == len(ids)
    assert [run.repeats for run in runs] == [1, 1, 1, 1]
    broken = ids_of("\u4f60")[:-1] + ids_of("b")
    assert [run.text for run in token_runs(broken, [-100] * len(broken), tokenizer)] == ["\ufffd"] * (
        len(broken) - 1
    ) + ["b"]


def test_runs_of_placeholders_are_counted_and_keep_apart_what_differs(tokenizer: Tokenizer) -> None:
    pad, image, video = tokenizer.pad_id, tokenizer.image_pad_id, tokenizer.video_pad_id
    ids = [image, image, video, 65, 65, pad, pad, pad]
    runs = token_runs(ids, [-100, -100, -100, 65, -100, -100, -100, -100], tokenizer)
    assert [run.count for run in runs] == [2, 1, 1, 1, 3]
    assert [run.visual for run in runs] == [True, True, False, False, False]
    assert [run.in_loss for run in runs] == [False, False, False, True, False]


def test_an_unknown_key_is_refused(shard_directories: dict[str, Path]) -> None:
    with pytest.raises(DataError, match="key 'x' does not exist"):
        preview_sample(shard_directories["text"], key="x")
