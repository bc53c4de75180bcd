# SPDX-License-Identifier: Apache-2.0
"""Tests of mindvl_cli.curation_text."""

from dataclasses import dataclass

from mindvl_cli.curation_text import explain_steps, explanation_text, parameter_notes
from mindvl_data.curation.step import all_steps


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters of a step.

    Attributes:
        low, high: Ends of the range,
            both included.
        name: A name.
    """

    low: int
    high: int = 3
    name: str = ""


def test_the_docstring_gives_a_note_for_each_parameter() -> None:
    assert parameter_notes(Parameters) == {
        "low": "Ends of the range, both included.",
        "high": "Ends of the range, both included.",
        "name": "A name.",
    }


def test_parameters_of_a_base_class_are_explained_too() -> None:
    @dataclass(frozen=True, kw_only=True)
    class More(Parameters):
        """More parameters.

        Attributes:
            extra: An extra.
        """

        extra: int = 0

    assert parameter_notes(More) == {**parameter_notes(Parameters), "extra": "An extra."}


def test_the_text_names_values_defaults_facts_and_reasons() -> None:
    step = all_steps()["exact_duplicates"]
    text = explanation_text(explain_steps([("exact_duplicates", step.config(content="text"))]))

    assert text.startswith("exact_duplicates")
    assert "  content: text (default: media_and_text)\n" in text
    assert "gives: duplicate_group, num_duplicates" in text
    for reason, sentence in step.reasons.items():
        assert f"drops {reason}: {sentence}" in text


def test_values_are_shown_as_a_pipeline_file_spells_them() -> None:
    text = explanation_text(explain_steps([("text_length", None), ("rewrite_answers", None)]))

    assert "  max_characters: null\n" in text
    assert "  ideographs_are_words: true\n" in text
    assert "  prompt_en: |\n          Rewrite the following answer" in text
    assert "\n          {question}\n" in text
