# SPDX-License-Identifier: Apache-2.0
"""`mindvl rehearse` through click: files, exit codes and refusals, on real rehearsals of a tiny recipe on a CPU."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mindvl_cli.commands.rehearse import rehearse
from mindvl_cli.commands.train import train
from mindvl_train import TrainError, claim

RECIPE = Path(__file__).parents[4] / "recipes" / "tiny" / "sft.yaml"
SMALL = ("global_batch_size=2", "parallel.pp_size=2", "data.packing.seq_length=256")


def _run(*words: str) -> Result:
    return CliRunner().invoke(rehearse, [str(RECIPE), *words], catch_exceptions=False)


@pytest.mark.slow
def test_a_job_that_fits_exits_with_0_and_a_dry_run_finds_it(tmp_path: Path) -> None:
    result = _run(*SMALL, f"out={tmp_path}", "--device", "cpu", "--devices", "2", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["ok"]
    assert "needs the most memory" in document["sentence"]
    directory = tmp_path / "rehearsal" / "cpu-2"
    names = {
        "index.html",
        "rehearsal.json",
        "run.lock",
        *(f"{kind}-0000{rank}.json" for kind in ("rank", "trace") for rank in (0, 1)),
    }
    assert {path.name for path in directory.iterdir()} == names
    assert json.loads((directory / "rehearsal.json").read_text()) == document
    words = [str(RECIPE), *SMALL, f"out={tmp_path}", "--dry-run", "--nproc", "2"]
    shown = CliRunner().invoke(train, words, catch_exceptions=False).stdout
    assert f"  rehearsal   cpu, {document['sentence'].removesuffix('.')} ({directory})\n" in shown


@pytest.mark.slow
def test_a_job_that_does_not_fit_exits_with_1_and_its_reason(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--devices", "2", "--memory-gb", "0.001", "--ranks", "1", "--out", str(tmp_path))
    result = _run(*SMALL, *words)
    assert result.exit_code == 1
    assert "does not fit: rank 1 needs the most memory" in result.stdout
    assert "reason: rank 1 needs" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "abacus", "--devices", "2"), "--device abacus: is unknown"),
        (("--device", "cpu", "--devices", "2", "--ranks", "some"), "--ranks: must be all"),
        (("--device", "cpu", "--devices", "2", "--ranks", "2"), "--ranks: 2 is not a rank"),
        (("--device", "cpu", "--devices", "3"), "does not divide 3 processes"),
    ],
)
def test_a_rehearsal_that_cannot_be_is_refused_before_it_starts(
    words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainError, match=message):
        _run(*SMALL, f"out={tmp_path}", *words)
    assert not list(tmp_path.iterdir())


def test_a_second_rehearsal_in_the_same_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "_TIMEOUT_S", 0.0)
    with claim.claimed(tmp_path), pytest.raises(TrainError, match="is locked by another run"):
        _run(*SMALL, "--device", "cpu", "--devices", "2", "--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [claim.FILE]


def test_the_device_is_required() -> None:
    result = _run("--devices", "2")
    assert result.exit_code == 2
    assert "Missing option '--device'" in result.stderr
