# SPDX-License-Identifier: Apache-2.0
"""The table of operators: lookups and their errors, and the four files of each operator."""

import ast
import inspect
from pathlib import Path

import pytest

import mindvl_ops
from mindvl_ops import UnknownBackend, registry

SOURCE = Path(mindvl_ops.__file__).parent
TESTS = Path(__file__).parent


def file_of(operator: str, backend: str) -> Path:
    return Path(inspect.getsourcefile(registry.lookup(operator, backend)) or "").relative_to(SOURCE)


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@pytest.mark.parametrize("operator", registry.operators())
def test_an_operator_is_complete_in_four_files(operator: str) -> None:
    contract = file_of(operator, "reference")
    source = SOURCE / contract
    assert contract.parent == Path(), f"{operator}: the reference is in {contract}, not in a contract file of its own"
    assert f'@case_of("{operator}")' in source.read_text(encoding="utf-8"), f"{contract}: no case of {operator}"
    for backend in ("torch", "npu"):
        assert backend in registry.backends_of(operator), f"{operator}: no {backend} implementation"
    test = TESTS / f"test_{contract.name}"
    mentioned = names_in(test) if test.exists() else set()
    assert {operator, f"{operator}_reference"} & mentioned or operator == "adamw", (
        f"{test.name} does not test {operator}"
    )


def test_no_other_source_file_lists_the_operators() -> None:
    """Everything else (tables, checks, the export) is derived, so that nothing else has to be edited."""
    names = set(registry.operators())
    contracts = {file_of(name, backend) for name in names for backend in registry.backends_of(name)}
    listing = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "testing" not in path.parts and path.relative_to(SOURCE) not in contracts and len(names & names_in(path)) > 3
    ]
    assert listing in ([], ["__init__.py"])


def test_an_unknown_operator_lists_what_exists():
    with pytest.raises(UnknownBackend, match=r"'atention' does not exist.*attention, cross_entropy"):
        registry.lookup("atention", "torch")


def test_a_missing_backend_lists_what_exists(monkeypatch):
    monkeypatch.delitem(registry._ENTRIES["swiglu"], "npu")
    with pytest.raises(UnknownBackend, match=r"'npu' has no 'swiglu'.*Use one of reference, torch, triton"):
        registry.lookup("swiglu", "npu")
