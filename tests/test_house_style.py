# SPDX-License-Identifier: Apache-2.0
"""The rules of the house that no linter knows: headers, sizes, mirrored tests, quiet imports, no trace of a machine."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
PACKAGES = ("mindvl_ops", "mindvl_data", "mindvl_model", "mindvl_train", "mindvl_merge", "mindvl_cli")

# Names, dataclasses and Protocols alone; what they do shows in the tests of the files that use them.
NO_TEST_NEEDED = {"__init__.py", "config.py", "errors.py", "types.py", "interfaces.py"}

# Source file (below src) -> test that covers it (below tests), where the mirrored place would be the wrong one.
TESTED_ELSEWHERE = {
    "mindvl_cli/demo/settings.py": "demo/test_recipe.py",
    "mindvl_data/formats/record.py": "formats/test_llava.py",
    "mindvl_ops/precision.py": "test_norm.py",
}

TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".css", ".html", ".json", ".csv", ".txt", ".typed", ""}

# In pieces, so that this file does not name them itself.
REGISTRY_HOSTS = ("pypi" + ".org", "python" + "hosted", "registry.npm" + "js", "download." + "pytorch")
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:wo" r"rk|ro" r"ot|ho" r"me|Us" r"ers|op" r"t)/\w")
STUB = re.compile("NotImplemented" r"Error|\bFIX" r"ME\b|\bX" r"XX\b|\bTO" r"DO\b(?!\(#\d+\))")
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


def _python(files: list[Path]) -> list[Path]:
    return [path for path in files if path.suffix == ".py"]


def _sources(files: list[Path]) -> list[Path]:
    return [path for path in _python(files) if path.parts[0] == "packages" and path.parts[2] == "src"]


def _texts(root: Path, files: list[Path]) -> Iterator[tuple[Path, str]]:
    for path in files:
        if path.suffix in TEXT_SUFFIXES and path.name != "LICENSE":
            yield path, (root / path).read_text(encoding="utf-8")


def test_every_python_file_opens_with_licence_and_docstring(root: Path, workspace_files: list[Path]) -> None:
    wrong = []
    for path in _python(workspace_files):
        text = (root / path).read_text(encoding="utf-8")
        if not text.startswith("# SPDX-License-Identifier: Apache-2.0\n") or not ast.get_docstring(ast.parse(text)):
            wrong.append(str(path))
    assert not wrong, "\n".join(wrong)


def test_no_source_file_and_no_function_is_too_long(root: Path, workspace_files: list[Path]) -> None:
    wrong = []
    for path in _sources(workspace_files):
        text = (root / path).read_text(encoding="utf-8")
        tree = ast.parse(text)
        if text.count("\n") > MAX_FILE_LINES:
            wrong.append(f"{path}: {text.count(chr(10))} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    wrong.append(f"{path}:{node.lineno}: {node.name} has {lines} lines")
    assert not wrong, "\n".join(wrong)


def test_everything_is_ascii(root: Path, workspace_files: list[Path]) -> None:
    wrong = [str(path) for path, text in _texts(root, workspace_files) if not text.isascii()]
    assert not wrong, "\n".join(wrong)


def test_no_file_has_a_name_that_says_nothing(workspace_files: list[Path]) -> None:
    assert [str(path) for path in workspace_files if {path.stem, *path.parts[:-1]} & VAGUE_NAMES] == []


def test_every_source_file_has_its_mirrored_test(workspace_files: list[Path]) -> None:
    """A directory of small files may share one test that carries the directory's name."""
    known = set(workspace_files)
    missing = []
    for path in _sources(workspace_files):
        if path.name in NO_TEST_NEEDED or "testing" in path.parts:
            continue
        tests, inside = Path(*path.parts[:2]) / "tests", Path(*path.parts[4:])
        elsewhere = TESTED_ELSEWHERE.get(Path(*path.parts[3:]).as_posix())
        mirrored = tests / (elsewhere or inside.parent / f"test_{inside.name}")
        for_directory = tests / inside.parent.parent / f"test_{inside.parent.name}.py"
        if mirrored not in known and not (inside.parent.parts and for_directory in known):
            missing.append(f"{path} wants {mirrored}")
    assert not missing, "\n".join(missing)


def test_every_test_file_names_something_that_exists(workspace_files: list[Path]) -> None:
    known = set(workspace_files)
    orphans = []
    for path in _python(workspace_files):
        if path.parts[0] != "packages" or path.parts[2] != "tests" or not path.name.startswith("test_"):
            continue
        package = path.parts[1]
        source = Path("packages", package, "src", package.replace("-", "_"), *path.parts[3:-1])
        name = path.stem.removeprefix("test_")
        is_directory = any(other.is_relative_to(source / name) for other in known)
        if name != "readme" and source / f"{name}.py" not in known and not is_directory:
            orphans.append(str(path))
    assert not orphans, "\n".join(orphans)


def test_no_lock_file_is_tracked(root: Path) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    assert "uv.lock" not in {Path(name).name for name in tracked.splitlines()}


def test_no_file_names_a_registry_or_a_place_on_one_machine(root: Path, workspace_files: list[Path]) -> None:
    wrong = []
    for path, text in _texts(root, workspace_files):
        wrong += [f"{path} names {host}" for host in REGISTRY_HOSTS if host in text]
        wrong += [f"{path} names {match.group()}..." for match in MACHINE_PATH.finditer(text)]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_left_as_a_stub(root: Path, workspace_files: list[Path]) -> None:
    wrong = []
    for path in _sources(workspace_files):
        wrong += [f"{path}: {match.group()}" for match in STUB.finditer((root / path).read_text(encoding="utf-8"))]
    assert not wrong, "\n".join(wrong)


IMPORT_CHECK = """
import importlib, os, threading
import torch, torch.distributed, transformers  # what they do on import is theirs

def state():
    return dict(os.environ), threading.active_count(), torch.get_num_threads()

before = state()
for name in {packages!r}:
    package = importlib.import_module(name)
    assert before == state(), f"import {{name}} changed the environment or started a thread"
    assert not torch.cuda.is_initialized(), f"import {{name}} touched a device"
    assert not torch.distributed.is_initialized(), f"import {{name}} made a process group"
    for public in getattr(package, "__all__", ()):
        assert hasattr(package, public), f"{{name}}.__all__ names {{public}}, which it does not have"
"""


def test_nothing_happens_on_import() -> None:
    code = IMPORT_CHECK.format(packages=PACKAGES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
