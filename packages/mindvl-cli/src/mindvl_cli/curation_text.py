# SPDX-License-Identifier: Apache-2.0
"""Explain curation steps: parameters with defaults, what a step needs and gives, and its reason codes.

Used by `mindvl data curate --explain` and by the generated reference page of the steps.
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable
from typing import Any, get_type_hints

from mindvl_cli.problems import describe
from mindvl_data.curation.config import CurationConfig
from mindvl_data.curation.segments import plain
from mindvl_data.curation.step import Step, find_step


def explain_pipeline(config: CurationConfig) -> dict[str, Any]:
    """The steps of a pipeline with the values of their parameters."""
    return explain_steps([(step.step, step.parameters) for step in config.steps])


def explain_steps(steps: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Steps with their parameters; the values are the defaults where none are given."""
    return {"steps": [_explained(find_step(name), parameters) for name, parameters in steps]}


def explanation_text(document: dict[str, Any]) -> str:
    """The explanation for a terminal."""
    return "\n\n".join(_step_text(step) for step in document["steps"])


def parameter_notes(config: type) -> dict[str, str]:
    """The text about each field in the `Attributes` of a dataclass; several names may share one text."""
    notes: dict[str, str] = {}
    for cls in reversed(config.__mro__[:-1]):
        _, _, attributes = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
        for names, text in re.findall(r"^ {4}([\w, ]+): (.+(?:\n {6,}.+)*)", attributes, re.MULTILINE):
            notes |= {name.strip(): " ".join(text.split()) for name in names.split(",")}
    return notes


def _explained(step: Step, parameters: Any) -> dict[str, Any]:
    notes, hints = parameter_notes(step.config), get_type_hints(step.config)
    values = []
    for field in dataclasses.fields(step.config):
        if not field.init:
            continue
        default = _default(field)
        value = default if parameters is None else plain(getattr(parameters, field.name))
        values.append(
            {
                "name": field.name,
                "type": describe(hints[field.name]),
                "is_required": field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
                "default": default,
                "value": value,
                "note": notes.get(field.name, ""),
            }
        )
    return {
        "step": step.name,
        "summary": step.summary,
        "section": step.section,
        "kind": "set" if step.sign is not None else "record",
        "extra": step.extra,
        "needs": list(step.needs),
        "gives": list(step.gives),
        "parameters": values,
        "reasons": step.reasons,
    }


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return plain(field.default)
    return None if field.default_factory is dataclasses.MISSING else plain(field.default_factory())


def _step_text(step: dict[str, Any]) -> str:
    section = f" (section {step['section']} of the paper)" if step["section"] else ""
    lines = [f"{step['step']}{section}", *_wrapped(step["summary"], "  ")]
    needs, gives = ", ".join(step["needs"]) or "nothing", ", ".join(step["gives"]) or "nothing"
    lines.append(f"  needs: {needs}; gives: {gives}")
    if step["extra"]:
        lines.append(f"  install: mindvl-data[curation,{step['extra']}]")
    for one in step["parameters"]:
        value = "required" if one["is_required"] and one["value"] is None else _shown(one["value"])
        changed = (
            f" (default: {_shown(one['default'])})" if not one["is_required"] and one["value"] != one["default"] else ""
        )
        lines.append(f"  {one['name']}: {value}{changed}")
        lines += _wrapped(one["note"], "      ") if one["note"] else []
    lines += [f"  drops {reason}: {sentence}" for reason, sentence in step["reasons"].items()]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(_shown(entry) for entry in value[:8])
        return f"[{shown}{', ...' if len(value) > 8 else ''}]"
    if isinstance(value, str) and "\n" in value:  # prompts: as a block of YAML
        return "|\n" + textwrap.indent(value, "          ")
    if value is None or isinstance(value, bool):  # as YAML spells them
        return "null" if value is None else str(value).lower()
    return '""' if value == "" else str(value)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent=indent)
