# SPDX-License-Identifier: Apache-2.0
"""The default prompts of the steps that ask a model, in English and Chinese, from the UTF-8 files in prompts/.

They are defaults of parameters, so that the manifest of a run contains the prompts that were used.
"""

from importlib.resources import files
from typing import Literal, Protocol

from mindvl_data.curation.dialogue import Language, check_language, language_of
from mindvl_data.curation.record import Record


class Prompted(Protocol):
    """The parameters of a step that asks a model in English or Chinese."""

    @property
    def language(self) -> Language: ...
    @property
    def prompt_en(self) -> str: ...
    @property
    def prompt_zh(self) -> str: ...


def default_prompt(name: str, language: Literal["en", "zh"]) -> str:
    """A prompt, for example ("recaption", "zh")."""
    return files("mindvl_data.curation").joinpath("prompts", f"{name}_{language}.prompt").read_text("utf-8").strip()


def check_prompts(config: "Prompted", *names: str) -> None:
    """Raise ValueError unless the language is known and both prompts contain `{name}` for each name."""
    check_language(config.language)
    for field in ("prompt_en", "prompt_zh"):
        prompt = getattr(config, field)
        for name in names:
            if f"{{{name}}}" not in prompt:
                raise ValueError(
                    f"{field}: the prompt does not contain {{{name}}}. Add it where its text is to appear."
                )


def prompt_for(record: Record, config: "Prompted") -> str:
    """The prompt in the language of a record."""
    return config.prompt_zh if language_of(record, config.language) == "zh" else config.prompt_en


def filled(prompt: str, **texts: str) -> str:
    """The prompt with each `{name}` replaced by its text; other braces stay as they are."""
    for name, text in texts.items():
        prompt = prompt.replace(f"{{{name}}}", text)
    return prompt
