# SPDX-License-Identifier: Apache-2.0
"""The default prompts."""

import re
from dataclasses import dataclass
from importlib.resources import files

import pytest

from mindvl_data.curation.dialogue import Language
from mindvl_data.curation.prompt_texts import check_prompts, default_prompt, filled, prompt_for
from mindvl_data.curation.record import Record


@dataclass(frozen=True)
class _Config:
    prompt_en: str
    prompt_zh: str
    language: Language = "record"


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


def test_a_prompt_without_its_field_and_an_unknown_language_are_refused() -> None:
    check_prompts(_Config("Judge {form}.", "\u8bc4\u5206 {form}"), "form")
    with pytest.raises(ValueError, match=r"prompt_zh: the prompt does not contain \{form\}"):
        check_prompts(_Config("Judge {form}.", "\u8bc4\u5206"), "form")
    with pytest.raises(ValueError, match="language: 'fr' is not known"):
        check_prompts(_Config("Judge.", "\u8bc4\u5206", language="fr"))  # type: ignore[arg-type]


def test_the_prompt_is_in_the_language_of_the_record() -> None:
    config, record = _Config("Judge.", "\u8bc4\u5206"), Record(number=0, id="r", body={})
    assert prompt_for(record, config) == "Judge."
    assert prompt_for(record.with_facts(language="zh"), config) == "\u8bc4\u5206"
