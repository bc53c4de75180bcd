# SPDX-License-Identifier: Apache-2.0
"""Reference of the curation steps and of the pipeline file, from the registry and the docstrings.

Comes before stage.py.
"""

import dataclasses
from typing import Any, get_type_hints

from mindvl_cli.curation_text import explain_steps, parameter_notes
from mindvl_cli.problems import describe
from mindvl_data.curation.config import CurationConfig, InputConfig, LimitsConfig, OutputConfig
from mindvl_data.curation.step import all_steps


def step_pages() -> str:
    """Markdown of every step, in the order of names."""
    return "\n\n".join(_step(step) for step in explain_steps([(name, None) for name in all_steps()])["steps"])


def file_tables() -> str:
    """Markdown of the keys of a pipeline file."""
    sections = (
        ("Top level", CurationConfig),
        ("inputs", InputConfig),
        ("output", OutputConfig),
        ("limits", LimitsConfig),
    )
    return "\n\n".join(f"### {title}\n\n{_fields(config)}" for title, config in sections)


def _step(step: dict[str, Any]) -> str:
    section = f" Section {step['section']} of the paper." if step["section"] else ""
    kind = " Decides over all records." if step["kind"] == "set" else ""
    extra = f" Needs the extra `{step['extra']}`." if step["extra"] else ""
    lines = [f"## {step['step']}", "", f"{_escaped(step['summary'])}{section}{kind}{extra}"]
    lines += ["", f"Needs: {_names(step['needs'])}. Gives: {_names(step['gives'])}.", ""]
    if step["parameters"]:
        lines += ["| parameter | default | type | |", "|---|---|---|---|"]
        for one in step["parameters"]:
            default = "required" if one["is_required"] else f"`{_shown(one['default'])}`"
            lines.append(f"| `{one['name']}` | {default} | {_escaped(one['type'])} | {_escaped(one['note'])} |")
        lines.append("")
    if step["reasons"]:
        lines += ["| reason | |", "|---|---|"]
        lines += [f"| `{reason}` | {_escaped(sentence)} |" for reason, sentence in step["reasons"].items()]
    return "\n".join(lines).rstrip()


def _fields(config: type) -> str:
    notes, hints = parameter_notes(config), get_type_hints(config)
    lines = ["| key | default | type | |", "|---|---|---|---|"]
    for field in dataclasses.fields(config):
        default = "required" if field.default is dataclasses.MISSING else f"`{_shown(field.default)}`"
        if field.default_factory is not dataclasses.MISSING:
            default = "see below"
        note = _escaped(notes.get(field.name, ""))
        lines.append(f"| `{field.name}` | {default} | {_escaped(describe(hints[field.name]))} | {note} |")
    return "\n".join(lines)


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) > 6:
        return f"{len(value)} entries"
    return _escaped(
        '""'
        if value == ""
        else "null"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("](", "]\\(")
