# SPDX-License-Identifier: Apache-2.0
"""The default prompts."""

import re
from importlib.resources import files

import pytest

from mindvl_data.curation.prompt_texts import check_fields, default_prompt, filled


def test_every_prompt_exists_in_english_and_chinese_with_the_same_fields() -> None:
    names = {path.name.rsplit("_", 1)[0] for path in files("mindvl_data.curation").joinpath("prompts").iterdir()}
    assert len(names) >= 6
    for name in names:
        english, chinese = default_prompt(name, "en"), default_prompt(name, "zh")
        assert english.isascii()
        assert any("\u4e00" <= character <= "\u9fff" for character in chinese)
        fields = [set(re.findall(r"\{([a-z]+)\}", text)) for text in (english, chinese)]
        assert fields[0] == fields[1], name


def test_only_named_fields_are_filled() -> None:
    assert filled('{a} {"b": {c}}', a="x{c}", c="y") == 'xy {"b": y}'
    assert filled("{a} {b}", a="1") == "1 {b}"


def test_a_prompt_without_its_field_is_refused() -> None:
    check_fields("prompt_en", "Judge {form}.", "form")
    with pytest.raises(ValueError, match=r"prompt_en: the prompt does not contain \{form\}"):
        check_fields("prompt_en", "Judge.", "form")
