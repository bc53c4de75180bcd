# SPDX-License-Identifier: Apache-2.0
"""`mindvl check packing` and `check parallel` on the tiny recipes, with real processes; and what they print."""

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mindvl_cli.commands.check import check
from mindvl_cli.commands.check_training import packing_text, parallel_text
from mindvl_cli.failures import CliError
from mindvl_train import TrainError
from mindvl_train.checks.packing import PackingReport
from mindvl_train.checks.parallel import LayoutReport
from mindvl_train.checks.runs import Difference

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[4] / "recipes" / "tiny"


def test_two_processes_train_as_one_and_a_run_of_other_weights_is_found(
    tiny_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layout is made to start from another seed, which must not go unnoticed."""
    module = importlib.import_module("mindvl_train.checks.parallel")
    real = module.in_layout

    def with_one_wrong(config: Any, name: str) -> Any:
        run, processes = real(config, "one" if name == "wrong" else name)
        return (replace(run, seed=1) if name == "wrong" else run), processes

    monkeypatch.setattr(module, "in_layout", with_one_wrong)
    monkeypatch.chdir(tiny_place)
    words = [
        "parallel",
        str(RECIPES / "sft-moe.yaml"),
        "--layouts",
        "ep2,wrong",
        "--steps",
        "1",
        "--packs",
        "2",
        "--json",
    ]
    result = CliRunner().invoke(check, words)
    equal, wrong = json.loads(result.stdout)["layouts"]
    assert (equal["layout"], equal["processes"], equal["holds"], equal["problem"]) == ("ep2", 2, True, "")
    assert not wrong["holds"]
    assert wrong["differences"]["gradient"]["value"] > 1e-3
    assert set(equal["differences"]) == {"loss", "grad_norm", "gradient", "router", "figures"}
    assert equal["note"] == ""  # some images are larger than a window
    assert result.exit_code == 1


def test_packing_holds_on_both_stages_of_a_pipeline(tiny_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_place)
    result = CliRunner().invoke(check, ["packing", str(RECIPES / "sft-deepseek.yaml"), "--layouts", "pp2"])
    assert result.exit_code == 0, result.output
    assert "kept" in result.stdout.splitlines()[1]


def test_an_impossible_layout_is_refused_before_anything_runs(
    tiny_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_place)
    result = CliRunner().invoke(check, ["parallel", str(RECIPES / "sft.yaml"), "--layouts", "dp2,ep2", "init={}"])
    assert isinstance(result.exception, TrainError)
    assert "--layouts: 'ep2': parallel.ep_size: 2, but the model has no experts" in str(result.exception)


def test_tables_say_what_differs_and_what_failed() -> None:
    columns = {name: Difference(f"a.{name}", 1e-7, 1e-5) for name in ("loss", "grad_norm", "gradient", "figures")}
    columns["gradient"] = Difference("a.b", 2e-6, 1e-5)
    good = LayoutReport(layout="dp2", processes=2, steps=3, differences=columns, note="no image is large")  # type: ignore[arg-type]
    router = {"router": Difference("routers/load/1", math.inf, 1e-5)}
    bad = replace(good, layout="tp2", differences=columns | router)  # type: ignore[arg-type]
    failed = LayoutReport(layout="pp2", processes=2, steps=3, problem="ValueError: no")
    lines = parallel_text([good, bad, failed]).splitlines()
    assert [word for line in lines[1:4] for word in ("equal", "differs", "failed") if word in line] == [
        "equal",
        "differs",
        "failed",
    ]
    assert lines[1].endswith("a.b")
    assert lines[2].endswith("routers/load/1")
    assert lines[4:] == ["pp2: ValueError: no", "note: no image is large"]
    leak = PackingReport(
        layout="one",
        processes=1,
        samples=3,
        tokens=96,
        loss=0.1,
        gradient=0.0,
        neighbour=0.0,
        poisoned=1.0,
        control=1.0,
    )
    assert "leaks" in packing_text([leak])
    assert "kept" in packing_text([replace(leak, loss=0.0)])
    assert "leaks" in packing_text([replace(leak, loss=0.0, control=1e-5)])  # a check that cannot fail proves nothing


@pytest.mark.parametrize("name", ["packing", "parallel", "alignment"])
def test_a_missing_directory_is_named_before_any_rank_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"mindvl_train.checks.{name}.check_{name}", lambda *_, **__: pytest.fail("it started"))
    result = CliRunner().invoke(check, [name, str(RECIPES / "sft.yaml")])
    assert isinstance(result.exception, CliError)
    assert "data.tokenizer: tokenizer does not exist. Create it, or set data.tokenizer=PATH." in str(result.exception)
