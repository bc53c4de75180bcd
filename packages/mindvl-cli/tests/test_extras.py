# SPDX-License-Identifier: Apache-2.0
"""Optional dependencies: a command names the extra that it lacks before it works, and pyproject.toml declares them."""

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindvl_cli import extras
from mindvl_cli.failures import CliError
from mindvl_cli.main import cli


@pytest.mark.parametrize(
    ("extra", "module", "named"), [("demo", "sklearn", "scikit-learn"), ("plots", "matplotlib", "matplotlib")]
)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    extra: str, module: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == module else found(name))
    with pytest.raises(CliError) as error:
        extras.require(extra, "mindvl demo")  # type: ignore[arg-type]
    assert str(error.value) == (
        f"mindvl demo: {named} is not installed. Install it with pip install 'mindvl-cli[{extra}]'."
    )


def test_a_command_that_draws_stops_before_it_works_and_only_when_it_would_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    result = CliRunner().invoke(cli, ["report", str(tmp_path), "--out", str(tmp_path / "run.html")], prog_name="mindvl")
    assert str(result.exception).startswith("mindvl report --out: matplotlib is not installed.")
    result = CliRunner().invoke(cli, ["report", str(tmp_path)])
    assert "metrics.jsonl" in str(result.exception)


def test_extras_that_are_checked_are_those_that_are_declared() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    wanted = {extra: {name for _, name in modules} for extra, modules in extras._EXTRAS.items()}
    assert {extra: set(names) for extra, names in project["optional-dependencies"].items()} == wanted
    assert not {name for names in wanted.values() for name in names} & set(project["dependencies"])


def test_an_installed_extra_passes() -> None:
    extras.require("demo", "mindvl demo")
