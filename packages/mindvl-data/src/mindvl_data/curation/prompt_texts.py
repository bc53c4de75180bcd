# SPDX-License-Identifier: Apache-2.0
"""The default prompts of the steps that ask a model, in English and Chinese, from the UTF-8 files in prompts/.

They are defaults of parameters, so that the manifest of a run contains the prompts that were used.
"""

from importlib.resources import files
from typing import Literal


def default_prompt(name: str, language: Literal["en", "zh"]) -> str:
    """A prompt, for example ("recaption", "zh")."""
    return files("mindvl_data.curation").joinpath("prompts", f"{name}_{language}.prompt").read_text("utf-8").strip()


def check_fields(field: str, prompt: str, *names: str) -> None:
    """Raise ValueError unless a prompt contains `{name}` for each name."""
    for name in names:
        if f"{{{name}}}" not in prompt:
            raise ValueError(f"{field}: the prompt does not contain {{{name}}}. Add it where its text is to appear.")


def filled(prompt: str, **texts: str) -> str:
    """The prompt with each `{name}` replaced by its text; other braces stay as they are."""
    for name, text in texts.items():
        prompt = prompt.replace(f"{{{name}}}", text)
    return prompt
