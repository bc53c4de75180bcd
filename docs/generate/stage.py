# SPDX-License-Identifier: Apache-2.0
"""Collect the pages of the site: every document of the repository, its links rewritten, its generated tables filled in.

`python docs/generate/stage.py OUT` writes OUT/pages and a copy of mkdocs.yml beside it, for any generator that reads
that file. Links work in a repository browser as they are written; here they become links between pages. A link to a
file that is no page, such as a source file, keeps its text only. A dead link, a missing anchor or an unknown table
ends the command with 1.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import commands
import fields
import formats
import steps
import tables

from mindvl_merge import MergeConfig
from mindvl_train import RunConfig
from mindvl_train.phases import PipelineConfig

ROOT = Path(__file__).parents[2]
NOT_PAGES = ("docs/generate",)

# Documents outside of docs/ -> page of the site.
OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "design/architecture.md",
    "CONTRIBUTING.md": "guides/contributing.md",
    "CHANGELOG.md": "reference/changelog.md",
    "SECURITY.md": "reference/security.md",
} | {
    f"packages/mindvl-{name}/README.md": f"reference/mindvl-{name}.md"
    for name in ("data", "ops", "model", "train", "merge", "cli")
}

FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
GENERATED = re.compile(r"^<!-- generated: ([\w-]+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def _configuration(config: type, title: str) -> str:
    return "\n\n".join(fields.describe(section, title=title) for section in fields.sections(config))


TABLES: dict[str, Callable[[], str]] = {
    "benchmark-formats": formats.benchmark_page,
    "commands": commands.command_pages,
    "curation-file": steps.file_tables,
    "curation-steps": steps.step_pages,
    "data-formats": formats.data_page,
    "devices": tables.device_table,
    "index-members": tables.index_member_table,
    "index-samples": tables.index_sample_table,
    "merge-fields": lambda: _configuration(MergeConfig, "Fields"),
    "operators": tables.operator_table,
    "pipeline-fields": lambda: _configuration(PipelineConfig, "Top level"),
    "recipe-fields": lambda: _configuration(RunConfig, "Top level"),
    "sizes": tables.size_table,
}


def stage(out: Path) -> list[str]:
    """Write all pages; returns what is wrong with them."""
    pages = _pages()
    shutil.rmtree(out / "pages", ignore_errors=True)
    problems: list[str] = []
    for source, page in pages.items():
        target = out / "pages" / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".md":
            target.write_text(_page(source, pages, problems), encoding="utf-8")
        else:
            shutil.copyfile(ROOT / source, target)
    shutil.copyfile(ROOT / "mkdocs.yml", out / "mkdocs.yml")
    return problems


def _pages() -> dict[str, str]:
    """File of the repository -> file of the site."""
    documents = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*") if path.is_file())
    inside = [
        path for path in documents if not path.startswith(NOT_PAGES) and Path(path).suffix in (".md", ".svg", ".css")
    ]
    return {path: path.removeprefix("docs/") for path in inside} | OUTSIDE


def _page(source: str, pages: dict[str, str], problems: list[str]) -> str:
    text = (ROOT / source).read_text(encoding="utf-8")
    text = GENERATED.sub(lambda match: _generated(match[1], source, problems), text)
    return _outside_of_code(text, lambda part: _relinked(part, source, pages, problems))


def _generated(name: str, source: str, problems: list[str]) -> str:
    if name in TABLES:
        return TABLES[name]()
    problems.append(f"{source}: there is no generated table {name!r}. Use one of {', '.join(sorted(TABLES))}.")
    return ""


def _outside_of_code(text: str, change: Callable[[str], str]) -> str:
    """Apply `change` to what stands between fenced blocks."""
    parts, end = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])


def _relinked(text: str, source: str, pages: dict[str, str], problems: list[str]) -> str:
    def relink(match: re.Match[str]) -> str:
        sign, label, link = match.groups()
        if re.match(r"[a-z]+:|#", link):
            return match[0]
        path, hash_sign, anchor = link.partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if not (ROOT / target).exists():
            problems.append(f"{source}: {link} leads nowhere. Correct the link.")
            return match[0]
        if target not in pages:
            return label
        place = os.path.relpath(pages[target], os.path.dirname(pages[source]) or ".")
        if sign and "currentColor" in (ROOT / target).read_text(encoding="utf-8"):  # drawn for light and dark pages
            return _figure(ROOT / target, label)
        return f"{sign}[{label}]({place}{hash_sign}{anchor})"

    return LINK.sub(relink, text)


def _figure(path: Path, description: str) -> str:
    """The drawing itself in place of a link to it, so that it takes the colors of the page, dark or light."""
    svg = path.read_text(encoding="utf-8")
    svg = re.sub(r"<\?xml.*?\?>\s*|<style>.*?</style>\s*|^\s*\n", "", svg, flags=re.DOTALL | re.MULTILINE)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{description}" ', 1).strip()
    return f'<div class="figure">{svg}</div>'


def main() -> int:
    """Stage into the directory named on the command line; 1 when something is wrong."""
    problems = stage(Path(sys.argv[1]))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
