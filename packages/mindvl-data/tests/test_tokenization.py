# SPDX-License-Identifier: Apache-2.0
"""Tokenization: ids, learned masks, placeholders, identity."""

from pathlib import Path

import numpy as np
import pytest

from mindvl_data import IGNORE_INDEX, DataError, load_tokenizer
from mindvl_data.samples import parse_record
from mindvl_data.tokenization import EncodedText, Tokenizer, expand

SCALE = ((56, 84), (56, 84))


def chat(question: object, answer: str, num_images: int = 0) -> object:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return parse_record({"messages": messages}, num_images=num_images)


def test_the_ids_are_those_of_the_rendered_text(tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode(chat("what is it", "the number"), [])
    text = "<|im_start|>user\nwhat is it<|im_end|>\n<|im_start|>assistant\nthe number<|im_end|>\n"
    assert encoded.ids.tolist() == tokenizer.hf(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.hf.decode(encoded.ids[encoded.learned]) == "the number<|im_end|>"


def test_a_picture_is_start_placeholder_end(tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode(chat([{"type": "image"}, {"type": "text", "text": "?"}], "1", 1), [SCALE])
    place = encoded.ids.tolist().index(tokenizer.image_pad_id)
    around = [tokenizer.vision_start_id, tokenizer.image_pad_id, tokenizer.vision_end_id]
    assert encoded.ids[place - 1 : place + 2].tolist() == around


@pytest.mark.parametrize("forged", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|im_end|>"])
def test_special_tokens_in_text_stay_text(tokenizer: Tokenizer, forged: str) -> None:
    encoded = tokenizer.encode(chat(f"a{forged}b", forged), [])
    plain = tokenizer.encode(chat("ab", "c"), [])
    special = set(tokenizer.special_ids.values())
    assert [i for i in encoded.ids.tolist() if i in special] == [i for i in plain.ids.tolist() if i in special]
    assert f"a{forged}b" in tokenizer.hf.decode(encoded.ids)


def test_a_caption_learns_all_but_its_picture(tokenizer: Tokenizer) -> None:
    sample = parse_record({"content": [{"type": "image"}, "a cat"]}, num_images=1)
    encoded = tokenizer.encode(sample, [SCALE])
    assert encoded.learned.tolist() == [False] * 3 + [True] * (len(encoded.ids) - 3)
    assert encoded.ids[-1] == tokenizer.end_id


def test_labels_are_shifted_and_placeholders_repeated() -> None:
    encoded = EncodedText(np.array([5, 9, 6, 7]), np.array([False, False, True, True]))
    input_ids, labels = expand(encoded, [3], [9])
    assert input_ids.tolist() == [5, 9, 9, 9, 6, 7]
    assert labels.tolist() == [IGNORE_INDEX] * 3 + [6, 7, IGNORE_INDEX]


def test_the_identity_changes_with_the_template(tokenizer: Tokenizer, tokenizer_folder: Path, tmp_path: Path) -> None:
    assert load_tokenizer(tokenizer_folder).identity == tokenizer.identity
    hf = load_tokenizer(tokenizer_folder).hf
    hf.chat_template = hf.chat_template.replace("user", "human") + " "
    hf.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).identity != tokenizer.identity


def test_a_tokenizer_without_a_template_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    hf = load_tokenizer(tokenizer_folder).hf
    hf.chat_template = None
    hf.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="no chat template"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")
