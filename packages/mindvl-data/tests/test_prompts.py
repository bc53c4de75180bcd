# SPDX-License-Identifier: Apache-2.0
"""A prompt is what transformers renders with a generation prompt, with the images before its end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mindvl_data import DataConfig, DataError, SourceIndex
from mindvl_data.order.sources import source_rules
from mindvl_data.prompts import first_prompts, plain_text, prompt_batch, read_prompts
from mindvl_data.shards.files import ShardFiles
from mindvl_data.tokenization import Tokenizer

Make = Callable[..., DataConfig]


def read(config: DataConfig, tokenizer: Tokenizer, path: Path) -> list[Any]:
    return read_prompts(path, rules=source_rules(config.sources[0], config), tokenizer=tokenizer)


def test_a_prompt_ends_where_the_answer_begins(
    make_config: Make, tokenizer: Tokenizer, hf: Any, tmp_path: Path
) -> None:
    Image.new("RGB", (56, 28), "red").save(tmp_path / "red.png")
    path = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "Which colour?", "images": ["red.png"], "expected": "red"},
        {"prompt": "One <|im_end|> two"},  # a special token in a text is text
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    coloured, plain = read(make_config(), tokenizer, path)
    messages = [{"role": "user", "content": "<|vision_start|><|image_pad|><|vision_end|>Which colour?"}]
    text = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    num_visual = int(coloured.sample.image_grid_thw.prod()) // 4
    expected = hf.encode(text.replace("<|image_pad|>", num_visual * "<|image_pad|>"), add_special_tokens=False)
    assert coloured.sample.input_ids.tolist() == expected
    assert (coloured.expected, coloured.name) == ("red", f"{path}:1")
    assert len(coloured.sample.pixel_values) == num_visual * 4
    assert "Which colour?" in coloured.text
    assert plain.expected is None
    assert len(plain.sample.image_grid_thw) == 0
    ends = [token for token in plain.sample.input_ids.tolist() if token == tokenizer.end_id]
    assert len(ends) == len([token for token in expected if token == tokenizer.end_id])


def test_the_first_samples_of_a_source_are_prompts_with_their_answers(make_config: Make, tokenizer: Tokenizer) -> None:
    config = make_config()
    images, text = (SourceIndex(source, config, tokenizer, ShardFiles(config.store)) for source in config.sources)
    found = list(first_prompts(images, 3, tokenizer=tokenizer))
    assert len(found) == 3
    for number, prompt in enumerate(found):
        raw = images.read(0, number)
        answer = next(m for m in json.loads(raw.record)["messages"] if m["role"] == "assistant")
        shown = answer["content"] if isinstance(answer["content"], str) else answer["content"][0]["text"]
        assert prompt.expected == shown.strip()
        assert prompt.name == f"images: {images.index.shards.names[0]}:{raw.key}"
        visual = int((prompt.sample.input_ids == tokenizer.image_pad_id).sum())
        assert visual * 4 == len(prompt.sample.pixel_values) == int(prompt.sample.image_grid_thw.prod(axis=1).sum())
    assert list(first_prompts(text, 3, tokenizer=tokenizer)) == []  # texts have no question


def test_only_the_last_token_of_a_batch_has_a_label(make_config: Make, tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = make_config()
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abc"}\n')
    (prompt,) = read(config, tokenizer, path)
    length = len(prompt.sample.input_ids)
    batch = prompt_batch(prompt, [9, 10], config=config, tokenizer=tokenizer, position_kind="rope")
    assert batch.input_ids[length : length + 2].tolist() == [9, 10]
    assert batch.loss_positions.tolist() == [length + 1]
    empty = prompt_batch(None, (), config=config, tokenizer=tokenizer, position_kind="rope")
    assert (len(empty.samples), empty.num_loss_tokens) == (0, 0)


def test_special_tokens_are_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.backend.encode("red", add_special_tokens=False).ids
    assert plain_text([tokenizer.end_id, *ids, tokenizer.end_id], tokenizer) == "red"


def test_a_file_without_prompts_is_refused(make_config: Make, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n")
    with pytest.raises(DataError, match=r"has no prompt\. Write lines such as"):
        read(make_config(), tokenizer, path)
    with pytest.raises(DataError, match="the file cannot be read"):
        read(make_config(), tokenizer, tmp_path / "gone.jsonl")
