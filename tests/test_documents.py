# SPDX-License-Identifier: Apache-2.0
"""What the documents say exists: links, commands with their options, nox sessions, versions, examples that are run."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mindvl_cli.commands import doctor
from mindvl_cli.main import cli

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`(mindvl [^`\n]+)`(?!`)")
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
SHELL = {"", "sh", "bash", "console"}
FILE = re.compile(r"(?<!`)`([\w.-]+(?:/[\w.-]+)+/?|[\w-]+\.(?:py|md|yaml))`(?!`)")
# First part of a path; so are directories in capitals, such as OUT/stages.
MADE_BY_THE_READER = {"runs", "photos.yaml", "shards", "mindvl-demo"}
PLACEHOLDER = re.compile(r"[\[\]<>|{}*]|\.\.\.")


@pytest.fixture(scope="session")
def documents(root: Path, workspace_files: list[Path]) -> dict[Path, str]:
    """Every Markdown file and its text."""
    return {path: (root / path).read_text(encoding="utf-8") for path in workspace_files if path.suffix == ".md"}


def _shell_lines(text: str) -> Iterator[str]:
    for language, body in FENCE.findall(text):
        if language in SHELL:
            yield from body.replace("\\\n", " ").splitlines()


def _commands(text: str) -> Iterator[list[str]]:
    """The arguments of every `mindvl` call in shell blocks and in running text."""
    for line in _shell_lines(text):
        for part in re.split(r"&&|;|\|", line.removeprefix("$ ")):
            words = _split(part)
            if "mindvl" in words[:4]:  # after "uv run", a variable, or nothing
                yield words[words.index("mindvl") + 1 :]
    for match in INLINE.findall(FENCE.sub("", text)):
        words = _split(match)[1:]
        cut = next((i for i, word in enumerate(words) if PLACEHOLDER.search(word)), None)
        yield [*words[:cut], "..."]  # prose names a command or an option without all it needs


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []  # prose with an apostrophe, drawn diagrams


def _complaint(words: list[str]) -> str | None:
    """Why click would refuse these words, without running anything; None when it would not."""
    command: click.Command = cli
    context = click.Context(cli, info_name="mindvl")
    words = list(words)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        if words[0] == "..." or words[0].isupper():
            return None  # "mindvl COMMAND --help"
        found = command.get_command(context, words[0])
        if found is None:
            return f"no command {words[0]!r}"
        command, context = found, click.Context(found, info_name=words.pop(0), parent=context)
    is_cut = "..." in words
    try:
        values, rest, _ = command.make_parser(context).parse_args([word for word in words if word != "..."])
    except click.UsageError as error:
        return None if is_cut and isinstance(error, click.BadOptionUsage) else error.format_message()
    if is_cut or {"help", "version"} & values.keys() or isinstance(command, click.Group):
        return None
    if rest:
        return f"takes no {rest!r}"
    lacking = [parameter.name for parameter in command.params if parameter.required and not values.get(parameter.name)]
    return f"lacks {lacking}" if lacking else None


def test_every_command_shown_exists_with_its_options(documents: dict[Path, str]) -> None:
    wrong = []
    for path, text in documents.items():
        for words in _commands(text):
            complaint = _complaint(words)
            if complaint:
                wrong.append(f"{path}: mindvl {' '.join(words)}: {complaint}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "is_good"),
    [
        ("doctor --json", True),
        ("doctor --jsno", False),
        ("doctr", False),
        ("doctor extra", False),
        ("--help", True),
        ("doctor --help", True),
    ],
)
def test_the_check_of_commands_tells_good_from_bad(line: str, is_good: bool) -> None:
    assert (_complaint(line.split()) is None) == is_good


def test_the_readme_begins_with_the_demo_and_the_tests(documents: dict[Path, str]) -> None:
    lines = list(_shell_lines(documents[Path("README.md")]))
    assert any("pip install uv && uv run mindvl demo" in line for line in lines)
    assert any("pip install uv && uv run nox" in line for line in lines)


def test_ci_runs_the_test_command_of_the_readme(root: Path) -> None:
    assert "pip install uv && uv run nox" in (root / ".ci" / "run").read_text(encoding="utf-8")


def test_every_nox_session_shown_exists(root: Path, documents: dict[Path, str]) -> None:
    sessions = set(re.findall(r"^def ([a-z]\w*)\(session", (root / "noxfile.py").read_text(), re.MULTILINE))
    for path, text in documents.items():
        for name in re.findall(r"nox -s ['\"]?(\w+)", text):
            assert name in sessions, f"{path} names the nox session {name!r}; there are {sorted(sessions)}"


def test_no_document_has_marks_of_a_merge_conflict(documents: dict[Path, str]) -> None:
    marks = re.compile(r"^(?:<{7} |>{7} |={7}$)", re.MULTILINE)
    assert [str(path) for path, text in documents.items() if marks.search(text)] == []


def test_every_relative_link_leads_somewhere(root: Path, documents: dict[Path, str]) -> None:
    wrong = []
    for path, text in documents.items():
        for link in LINK.findall(FENCE.sub("", text)):
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = link.partition("#")
            place = (root / path.parent / target).resolve() if target else root / path
            if not place.exists():
                wrong.append(f"{path}: {link} leads nowhere")
            elif anchor and place.suffix == ".md" and anchor not in _anchors(place.read_text(encoding="utf-8")):
                wrong.append(f"{path}: {link} has no such heading")
    assert not wrong, "\n".join(wrong)


def test_every_file_named_in_running_text_exists(root: Path, documents: dict[Path, str]) -> None:
    wrong = []
    for path, text in documents.items():
        for name in FILE.findall(FENCE.sub("", text)):
            if not _is_there(root, root / path.parent, name):
                wrong.append(f"{path}: `{name}` does not exist")
    assert not wrong, "\n".join(wrong)


def _is_there(root: Path, beside: Path, name: str) -> bool:
    first = name.partition("/")[0]
    if first.isupper() or first in MADE_BY_THE_READER:
        return True
    patterns = ("packages/*", "packages/*/src", "packages/*/src/*")
    directories = [root, beside, *(directory for pattern in patterns for directory in root.glob(pattern))]
    return any((directory / name).exists() for directory in directories)


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ("`src/mindvl_train/config.py`", True),
        ("`src/mindvl_train/phase.py`", False),
        ("`mindvl_data/formats/`", True),
        ("`main.py`", True),
        ("`nothing.py`", False),
        ("`OUT/stages`", True),
    ],
)
def test_the_check_of_files_tells_good_from_bad(root: Path, text: str, is_good: bool) -> None:
    (name,) = FILE.findall(text)
    assert _is_there(root, root, name) == is_good


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_package_readme_has_an_example_that_its_tests_run(root: Path) -> None:
    for readme in sorted((root / "packages").glob("*/README.md")):
        name = readme.parent.name
        assert "```python\n" in readme.read_text(encoding="utf-8"), f"{name}: its README shows no example"
        tests = (path.read_text(encoding="utf-8") for path in (readme.parent / "tests").rglob("test_*.py"))
        assert any("README.md" in text for text in tests), f"{name}: no test runs the example of its README"


def test_the_changelog_has_a_section_for_every_package_at_its_version(root: Path, documents: dict[Path, str]) -> None:
    changelog = documents[Path("CHANGELOG.md")]
    for pyproject in sorted((root / "packages").glob("*/pyproject.toml")):
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        section = re.search(rf"^## {project['name']}\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
        assert section, f"CHANGELOG.md has no section {project['name']}"
        assert f"### {project['version']}" in section.group(1), (
            f"{project['name']} {project['version']} is not in the changelog"
        )


def test_the_doctor_wants_what_the_pins_install(root: Path) -> None:
    pins = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]["constraint-dependencies"]
    versions = dict(pin.split("==") for pin in pins if ";" not in pin)
    for name in doctor.REQUIRED:
        assert doctor.check_version(name, versions[name]).status == "ok", f"{name} is pinned to {versions[name]}"
