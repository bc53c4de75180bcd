# SPDX-License-Identifier: Apache-2.0
"""House rules that no linter checks: headers, sizes, mirrored tests, imports, paths, words, help texts, messages."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mindvl_cli.main import COMMANDS, cli

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
PACKAGES = ("mindvl_ops", "mindvl_data", "mindvl_model", "mindvl_train", "mindvl_merge", "mindvl_cli")

# Names, dataclasses and Protocols alone; what they do shows in the tests of the files that use them.
NO_TEST_NEEDED = {"__init__.py", "config.py", "errors.py", "types.py", "interfaces.py"}

# Source file (below src) -> test that covers it (below tests), where the mirrored place would be the wrong one.
TESTED_ELSEWHERE = {
    "mindvl_cli/demo/settings.py": "demo/test_recipe.py",
    "mindvl_data/formats/record.py": "formats/test_conversation.py",
    "mindvl_ops/precision.py": "test_norm.py",
}

TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".css", ".html", ".json", ".csv", ".txt", ".typed", ""}

# Families of models in names; llama3 alone is a kind of rotary embedding.
FAMILY = re.compile(r"qwen|deepseek|mistral|gemma|dots1|llama(?!3)", re.IGNORECASE)
FAMILIES_NAMED_IN = (
    "mindvl_model/families/",  # presets and keys of config.json
    "mindvl_model/sizes.py",  # named sizes
    "mindvl_model/testing/tiny.py",  # the smallest model of each family
    "mindvl_model/vision/",  # entries of the vision encoders
    "mindvl_model/vision_config.py",
    *(  # whole directories of transformers and vLLM
        f"mindvl_model/hf/{name}.py"
        for name in (
            "config_json",
            "configuration_mindvl",
            "modeling_mindvl",
            "processing_mindvl",
            "vllm_model",
            "whole_models",
        )
    ),
    "mindvl_data/tokenizer_directory.py",  # tokenizer classes of transformers
)

# Patches of 14 pixels and visual tokens of 28 x 28 pixels are those of one vision encoder.
PATCH_GEOMETRY = re.compile(
    r"\b28 ?(?:\*|x) ?28\b|\b28 ?\*\* ?2\b|\b784\b|\b588\b|(?:patch_size|multiple)[^\w,)][^,)]*\b(?:14|28)\b"
)
PATCH_GEOMETRY_IN = (
    "mindvl_model/vision/",  # entries of the vision encoders
    "mindvl_data/preprocessing.py",  # for callers without a model
    "mindvl_merge/evaluation/resolution.py",  # the same
    "mindvl_cli/demo/",  # its sizes are those of its own model
)

# In pieces, so that this file does not name them itself.
REGISTRY_HOSTS = ("pypi" + ".org", "python" + "hosted", "registry.npm" + "js", "download." + "pytorch")
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:wo" r"rk|ro" r"ot|ho" r"me|Us" r"ers|op" r"t)/\w")
STUB = re.compile("NotImplemented" r"Error|\bFIX" r"ME\b|\bX" r"XX\b|\bTO" r"DO\b(?!\(#\d+\))")

# What to write -> what is never written: whole words in any case, in source, help texts, messages and documents.
BANNED = {
    "an active sentence with a subject": r"nobody|whom|speaks? for|no patience",
    "anomalous step": r"bad steps?",
    "assigned, sharded": r"dealt",
    "asynchronous save": r"beside training",
    "device setup": r"doorways?",
    "directory": r"folders?",
    "fix, correct, check": r"mend(?:s|ed|ing)?",
    "global_batch_size": r"packs[ _]per[ _]step|rows (?:of|in|per) (?:a|each|the) step",
    "image": r"pictures?",
    "implementation": r"twins?",
    "layout search, data order": r"planners?(?!_data)",
    "logged, raised, reported": r"told|said|heard",
    "loss tokens": r"learned tokens?",
    "overfits": r"by heart",
    "packed sequence": r"packed (?:rows?|packs?)",
    "pipeline file": r"plan\.yaml|plan of several",
    "resume, continue": r"go(?:es|ing)? on|went on|take(?:s|n)? up|took up",
    "silently": r"without a word",
    "vision encoder": r"towers?",
}
# Also as a part of a name such as test_the_tower_is_frozen.
BANNED_PATTERNS = {
    name: re.compile(rf"(?<![^\W_])(?:{words})(?![^\W_])", re.IGNORECASE) for name, words in BANNED.items()
}
ANY_BANNED = re.compile(rf"(?<![^\W_])(?:{'|'.join(BANNED.values())})(?![^\W_])", re.IGNORECASE)
WORDS_CHECKED_IN = {"packages", "tests", "docs", "recipes", "noxfile.py"}  # and documents beside them
WORDS_ALLOWED = {
    "CHANGELOG.md": "earlier releases used the old names",
    "packages/mindvl-cli/src/mindvl_cli/commands/data.py": "refuses the old format name",
    "packages/mindvl-cli/src/mindvl_cli/renamed.py": "lists the old recipe keys and options",
    "packages/mindvl-cli/tests/test_renamed.py": "the same",
    "tests/test_house_style.py": "lists the words",
    "packages/mindvl-data/src/mindvl_data/formats/columns.py": "lists column names of other data sets",
    "packages/mindvl-model/src/mindvl_model/hf/vllm_model.py": "calls methods of vLLM",
    "packages/mindvl-merge/src/mindvl_merge/names.py": "lists tensor names of other models",
    "packages/mindvl-merge/tests/test_names.py": "the same",
}
HELP_VERBS = {
    *("Check", "Compare", "Convert", "Estimate", "Find", "List", "Measure", "Merge", "Recompute", "Report"),
    *("Run", "Score", "Serve", "Show", "Start", "Summarize", "Talk", "Train", "Validate", "Write"),
}
NO_HELP_STARTS = {
    *("At", "Between", "By", "For", "From", "How", "In", "Of", "On", "Such", "That", "Told", "What", "When", "Where"),
    *("Which", "With", "Without"),
}

# Errors with a reason only: the code that catches them adds WHERE and WHAT TO DO.
REASONS = {
    "AssertionError": "our own mistakes",
    "AttributeError": "protocol of Python",
    "BadParameter": "click adds the option",
    "DamagedCheckpointError": "the class adds what to do",
    "ForeignTensorsError": "the reader of the checkpoint adds the checkpoint",
    "IndexError": "protocol of Python",
    "KeyError": "protocol of Python",
    "NotImplementedError": "abstract methods",
    "RecordError": "the reader adds file and record",
    "SampleError": "the loader adds shard and key",
    "SealError": "the reader of the index adds the file",
    "StopIteration": "protocol of Python",
    "TableError": "the step that catches it drops the record for this reason",
    "TemplateError": "the loader adds the tokenizer",
    "TimeoutExpired": "protocol of subprocess",
    "TypeError": "our own mistakes",
    "UnpicklingError": "the reader of the checkpoint adds the file",
    "YAMLError": "load.py adds file and line",
}
# Files whose exceptions never reach a user as they are.
MESSAGES_ALLOWED = {
    "packages/mindvl-merge/src/mindvl_merge/files.py": "ValueError of a JSON hook, which gets the file's name",
    "packages/mindvl-model/src/mindvl_model/weights/json_file.py": "ValueError of a JSON hook, which gets the file's name",
}
PREDICATE = re.compile(r"(?<!\S)(?:is|are|was|were|has|have|cannot|does|do|must|needs?|got)(?!\S)")

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
    directories = {parent for path in known for parent in path.parents}
    orphans = []
    for path in _python(workspace_files):
        if path.parts[0] != "packages" or path.parts[2] != "tests" or not path.name.startswith("test_"):
            continue
        package = path.parts[1]
        source = Path("packages", package, "src", package.replace("-", "_"), *path.parts[3:-1])
        name = path.stem.removeprefix("test_")
        if name != "readme" and source / f"{name}.py" not in known and source / name not in directories:
            orphans.append(str(path))
    assert not orphans, "\n".join(orphans)


def test_no_model_family_is_named_outside_presets_and_mappings(root: Path, workspace_files: list[Path]) -> None:
    """Behaviour depends on properties: families are named where data about them stands. Prose is not checked."""
    found = []
    for path in _python(workspace_files):
        if path.parts[2:3] == ("src",) and not any(part in path.as_posix() for part in FAMILIES_NAMED_IN):
            found += [f"{path}:{line}: {name}" for line, name in _family_names((root / path).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("if config.kind == 'qwen3_moe': pass", ["qwen3_moe"]),
        ("isinstance(language, DeepSeekV3Preset)", ["DeepSeekV3Preset"]),
        ("def smallest_llama(): return 1", ["smallest_llama"]),
        ("kind = 'llama3'\nLlama3Scaling(factor=8.0)", []),  # a kind of rotary embedding
        ("def f():\n    'As in Qwen3.'  # Qwen3\n    raise E('model: use a Qwen3 model')", []),
    ],
)
def test_the_check_of_family_names_finds_code_and_no_prose(source: str, names: list[str]) -> None:
    assert [name for _, name in _family_names(source)] == names


def test_the_patch_size_of_one_encoder_is_written_in_its_entry_only(root: Path, workspace_files: list[Path]) -> None:
    found = []
    for path in _python(workspace_files):
        if path.parts[2:3] == ("src",) and not any(part in path.as_posix() for part in PATCH_GEOMETRY_IN):
            lines = enumerate((root / path).read_text().splitlines(), start=1)
            found += [f"{path}:{number}: {line.strip()}" for number, line in lines if PATCH_GEOMETRY.search(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("_UNIT_PIXELS = 28 * 28", True),
        ("multiple: int = 28,", True),
        ("vision.patch_size == 14", True),
        ("row_label='min pixels / 28x28'", True),
        ("tokens = pixels // 784", True),
        ("num_bands: int = 14", False),
        ("patch_size=vision.patch_size, num_bins=28", False),
    ],
)
def test_the_check_of_patch_sizes_finds_code_that_was_there_and_no_other_numbers(line: str, is_found: bool) -> None:
    assert bool(PATCH_GEOMETRY.search(line)) == is_found


def _family_names(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of identifiers, and of strings that could be one, that contain the name of a family."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.strip("\"'") if token.type == tokenize.STRING else token.string
        if token.type in (tokenize.NAME, tokenize.STRING) and text.isidentifier() and FAMILY.search(text):
            yield token.start[0], text


def test_no_lock_file_is_tracked(root: Path) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    assert "uv.lock" not in {Path(name).name for name in tracked.splitlines()}


def test_no_file_names_a_registry_or_a_place_on_one_machine(root: Path, workspace_files: list[Path]) -> None:
    wrong = []
    for path, text in _texts(root, workspace_files):
        wrong += [f"{path} names {host}" for host in REGISTRY_HOSTS if host in text]
        wrong += [f"{path} names {match.group()}..." for match in MACHINE_PATH.finditer(text)]
    assert not wrong, "\n".join(wrong)


def test_no_conflict_of_a_merge_is_left(root: Path, workspace_files: list[Path]) -> None:
    marks = re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE)
    assert [str(path) for path, text in _texts(root, workspace_files) if marks.search(text)] == []


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


@pytest.mark.parametrize("package", ["mindvl_data", "mindvl_merge"])
def test_a_package_is_imported_without_torch_and_numpy(package: str) -> None:
    code = f"import sys, {package}; print(sorted({{'torch', 'numpy', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_no_banned_word_is_used(root: Path, workspace_files: list[Path]) -> None:
    paths = [path for path in workspace_files if path.parts[0] in WORDS_CHECKED_IN or path.match("*.md")]
    wrong: list[str] = []
    for path, text in _texts(root, paths):
        if path.as_posix() in WORDS_ALLOWED:
            continue
        if not ANY_BANNED.search(text):
            continue
        for instead, pattern in BANNED_PATTERNS.items():
            for match in pattern.finditer(text):
                where = f"{path}:{text.count(chr(10), 0, match.start()) + 1}"
                wrong.append(f"{where}: {match.group()!r}. Write: {instead}.")
    assert not wrong, "\n".join(wrong)


def _command_tree(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from _command_tree(found, f"{name} {below}")


def test_every_command_help_starts_with_a_verb_and_ends_with_a_full_stop() -> None:
    texts = {f"mindvl --help: {name}": text for name, (_, text) in COMMANDS.items()}
    for name, command in _command_tree(cli, "mindvl"):
        texts[name] = (command.help or "").partition("\n\n")[0].replace("\n", " ")
        if command.short_help:
            texts[f"{name} (short help)"] = command.short_help
    wrong = [
        f"{name}: {text!r}" for name, text in texts.items() if _first_word(text) not in HELP_VERBS or text[-1] != "."
    ]
    assert not wrong, "\n".join(wrong)


def test_every_option_has_a_help_text_that_is_no_fragment() -> None:
    wrong = []
    for name, command in _command_tree(cli, "mindvl"):
        for option in command.params:
            if not isinstance(option, click.Option) or option.hidden:
                continue
            text = option.help or ""
            is_fragment = not text[:1].isupper() and "," not in text.split(":")[0]
            if not text or is_fragment or _first_word(text) in NO_HELP_STARTS or text[-1] not in ".]":
                wrong.append(f"{name} {option.opts[0]}: {text!r}")
    assert not wrong, "\n".join(wrong)


def _first_word(text: str) -> str:
    return text.partition(" ")[0].strip(",.")


def test_every_message_has_where_what_and_what_to_do(root: Path, workspace_files: list[Path]) -> None:
    """As far as the source shows it: `WHERE: WHAT. WHAT TO DO.`, or one sentence that says what a value must be."""
    wrong: list[str] = []
    for path in _sources(workspace_files):
        if path.as_posix() in MESSAGES_ALLOWED or "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or not node.exc.args:
                continue
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            text = _literal(node.exc.args[0])
            if not name[0].isupper() or name in REASONS or text is None:
                continue
            complaint = _message_complaint(text)
            if complaint:
                wrong.append(f"{path}:{node.lineno}: {name}: {complaint}: {text!r}")
    assert not wrong, "\n".join(wrong)


def _literal(node: ast.expr) -> str | None:
    """The text of a string expression, with {} for every value; None where there is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _literal(node.left), _literal(node.right)
        return None if left is None and right is None else (left or "{}") + (right or "{}")
    return None


def _message_complaint(text: str) -> str | None:
    where, colon, rest = text.partition(": ")
    if not colon or re.search(r"[.!?] ", where) or PREDICATE.search(where):
        return "starts without WHERE"
    if rest.endswith("{}"):  # the end is not in the source
        return None
    if rest[-1] not in ".!?`":
        return "ends without a full stop"
    has_two_sentences = re.search(r"[.!?)}]['\"`)]? +[^\s]", rest)
    return None if has_two_sentences or rest.startswith("must ") or ": must " in rest else "lacks WHAT TO DO"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}: data.store.cache: {} is not writable. Choose another directory.", None),
        ("faults.stuck_after_s: must be a finite number >= 0, got {}.", None),
        ("{}: {}", None),
        ("no metrics.jsonl. {}. Give the directory of a run.", "starts without WHERE"),
        ("{} is bad (got: {}). Correct it.", "starts without WHERE"),
        ("{}: the file is missing.", "lacks WHAT TO DO"),
        ("{}: the file is missing. Copy it again", "ends without a full stop"),
    ],
)
def test_the_check_of_messages_tells_good_from_bad(text: str, complaint: str | None) -> None:
    assert _message_complaint(text) == complaint
