# SPDX-License-Identifier: Apache-2.0
"""Plant each bug of mutants.py into a copy of the sources and run the check or test that must fail; `nox -s mutants`.

Arguments are words in names of mutants; by default all are planted. The exit code is 1 if a bug is not detected.
`--write` writes the results to the table of docs/design/evidence/mutants.md.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants import MUTANTS, Command, Mutant

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "evidence" / "mutants.md"
PACKAGES = ("ops", "data", "model", "train", "merge", "cli")
TIMEOUT_S = 900
_LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*_cache", "benchmarks")


class NotNoticedError(Exception):
    """A check or test did not detect a bug, or failed without one."""


@dataclass(frozen=True)
class Outcome:
    """Result of a command on a copy of the sources."""

    passed: bool
    found: str  # what differs, or the test that failed


def main() -> int:
    """Run the session; returns the exit code."""
    parser = argparse.ArgumentParser(description="Plant bugs and verify that checks and tests detect them.")
    parser.add_argument("words", nargs="*", help="Words in names of mutants; default: all mutants.")
    parser.add_argument("--write", action="store_true", help="Write the table of docs/design/evidence/mutants.md.")
    options = parser.parse_args()
    chosen = [one for one in MUTANTS if not options.words or any(word in one.name for word in options.words)]
    if not chosen or (options.write and len(chosen) < len(MUTANTS)):
        parser.error("no mutant has these words in its name, or --write was given for a part of them.")
    outcomes, unnoticed = [], 0
    with tempfile.TemporaryDirectory(prefix="mindvl-mutants-") as temporary:
        data = make_data(Path(temporary) / "data")
        for command in dict.fromkeys(one.caught_by for one in chosen):
            outcome = run(command, copy_sources(Path(temporary) / "sound"), data)
            print(f"sound: {shown(command)}: {outcome.found or 'passed'}", flush=True)
            if not outcome.passed:
                raise NotNoticedError(f"{shown(command)}: fails without any bug: {outcome.found}. Fix it first.")
        for mutant in chosen:
            started = time.monotonic()
            copy = copy_sources(Path(temporary) / "planted")
            plant(mutant, copy)
            outcome = run(mutant.caught_by, copy, data)
            unnoticed += outcome.passed
            verdict = "NOT NOTICED" if outcome.passed else f"noticed: {outcome.found}"
            print(f"{mutant.name} ({time.monotonic() - started:.0f} s): {verdict}", flush=True)
            outcomes.append((mutant, outcome))
    print(f"{len(chosen) - unnoticed} of {len(chosen)} planted bugs were noticed")
    if options.write and not unnoticed:
        PAGE.write_text(with_table(PAGE.read_text(), outcomes))
    return 1 if unnoticed else 0


def make_data(directory: Path) -> Path:
    """The data of the tiny recipes, by the script that docs/guides/train.md shows."""
    text = (ROOT / "docs" / "guides" / "train.md").read_text()
    found = re.search(r"## Data for the tiny recipes\n.*?```python\n(.*?)```", text, re.DOTALL)
    if found is None:
        raise NotNoticedError(
            "docs/guides/train.md: has no script under 'Data for the tiny recipes'. Restore the section."
        )
    directory.mkdir()
    subprocess.run([sys.executable, "-c", found[1]], cwd=directory, env=_environment(ROOT), check=True)
    # The table of the page was measured with the tokenizer of the demo, which splits digits.
    again = "train_tokenizer(['what is written here? 0123456789', 'some words'], Path('tokenizer'))"
    code = f"from pathlib import Path; from mindvl_cli.demo.tokenizer import train_tokenizer; {again}"
    subprocess.run([sys.executable, "-c", code], cwd=directory, env=_environment(ROOT), check=True)
    return directory


def copy_sources(copy: Path) -> Path:
    """A fresh copy of packages, recipes and settings."""
    shutil.rmtree(copy, ignore_errors=True)
    for name in ("packages", "recipes"):
        shutil.copytree(ROOT / name, copy / name, ignore=_LEFT_OUT)
    shutil.copyfile(ROOT / "pyproject.toml", copy / "pyproject.toml")
    return copy


def plant(mutant: Mutant, copy: Path) -> None:
    """Replace the text of a mutant.

    Raises:
        NotNoticedError: The text is not in the file, or more than once.
    """
    path = copy / "packages" / mutant.file
    text = path.read_text() if path.is_file() else ""
    if (count := text.count(mutant.old)) != 1:
        raise NotNoticedError(
            f"packages/{mutant.file}: has the text of the mutant {mutant.name!r} {count} times instead of once: "
            f"{mutant.old!r}. Adapt tests/mutants/mutants.py to the sources."
        )
    path.write_text(text.replace(mutant.old, mutant.new))


def run(command: Command, copy: Path, data: Path) -> Outcome:
    """Run a check or tests on a copy of the sources."""
    kind, *words = command
    is_check = kind == "check"
    if is_check:
        words = [str(copy / word) if word.startswith("recipes/") else word for word in words]
        line = [sys.executable, "-m", "mindvl_cli.main", "check", *words, "--json"]
    else:
        line = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *words]
    done = subprocess.run(
        line,
        cwd=data if is_check else copy,
        env=_environment(copy),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    # Both exit with 1 on a difference; any other code is an error of the command.
    if done.returncode not in (0, 1):
        raise NotNoticedError(
            f"{shown(command)}: ended with code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        )
    if done.returncode == 0:
        return Outcome(True, "")
    found = _named_by_check(done.stdout) if is_check else _failed_test(done.stdout)
    if not found:
        raise NotNoticedError(f"{shown(command)}: failed and named nothing: {(done.stdout + done.stderr)[-2000:]}")
    return Outcome(False, found)


def shown(command: Command) -> str:
    """Format a command for the table."""
    kind, *words = command
    if kind == "pytest":
        return " ".join(word if word.startswith(("packages/", "-")) else f"'{word}'" for word in words)
    options = [word for word in words[2:] if "model.language={" not in word and word not in ("--packs", "--steps")]
    options = [word for word in options if not word.isdecimal() and not word.startswith("global_batch_size=")]
    family = "as Qwen2.5-VL" if any("kind: qwen2" in word for word in words) else ""
    return " ".join(filter(None, ("mindvl check", words[0], Path(words[1]).name, family, *options)))


def with_table(page: str, outcomes: Sequence[tuple[Mutant, Outcome]]) -> str:
    """The page with its table replaced."""
    lines = ["| area | planted bug | noticed by | named |", "|---|---|---|---|"]
    lines += [
        f"| {mutant.area} | {mutant.name} | `{shown(mutant.caught_by)}` | {outcome.found} |"
        for mutant, outcome in outcomes
    ]
    head, _, rest = page.partition("| area |")
    after = rest.partition("\n\n")[2]
    return head + "\n".join(lines) + "\n" + (f"\n{after}" if after else "")


def _named_by_check(text: str) -> str:
    """The differences in the JSON of a check."""
    try:
        report = json.loads(text)
    except ValueError:
        return ""
    if "layouts" not in report:
        named = [
            f"{name} {_number(value)}"
            for name, value in report["differences"].items()
            if value is None or value > report["bounds"][name]
        ]
        moved = report["moved_tokens"]
        return ", ".join([*named, *([f"positions of {moved} tokens"] if moved else [])])
    worst = next(layout for layout in report["layouts"] if not layout["holds"])
    if worst["problem"]:
        return f"failed: {worst['problem'][:80]}"
    if "differences" in worst:
        return ", ".join(
            f"{column} {_number(found['value'])}"
            for column, found in worst["differences"].items()
            if not found["holds"]
        )
    beyond = [name for name in ("loss", "gradient", "neighbour") if not (worst[name] or 0.0) <= worst[f"{name}_bound"]]
    silent = [name for name in ("poisoned", "control") if (worst[name] or 0.0) < 3 * worst["neighbour_bound"]]
    return ", ".join(f"{name} {_number(worst[name])}" for name in (*beyond, *silent))


def _number(value: float | None) -> str:
    return "inf" if value is None else f"{value:.1e}"


def _failed_test(text: str) -> str:
    found = re.search(r"^FAILED \S+?::(\w+)", text, re.MULTILINE)
    return found[1] if found else ""


def _environment(root: Path) -> dict[str, str]:
    sources = os.pathsep.join(str(root / "packages" / f"mindvl-{package}" / "src") for package in PACKAGES)
    return os.environ | {"PYTHONPATH": sources, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


if __name__ == "__main__":
    sys.exit(main())
