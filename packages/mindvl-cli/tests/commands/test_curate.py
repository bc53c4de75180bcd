# SPDX-License-Identifier: Apache-2.0
"""Tests of `mindvl data curate`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindvl_cli.interrupts import Stopped
from mindvl_cli.main import cli


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["data", "curate", *map(str, arguments)], catch_exceptions=True)
    if result.exception and not isinstance(result.exception, SystemExit):
        return 1, f"{result.output}{result.exception}"
    return result.exit_code, result.output


@pytest.fixture
def config(tmp_path: Path) -> Path:
    texts = ["one text", "another text", "one text", "a third text"]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = tmp_path / "pairs.yaml"
    path.write_text(
        f"""\
name: pairs
inputs:
  - {{path: {tmp_path / "raw.jsonl"}, format: jsonl}}
steps:
  - step: exact_duplicates
    content: text
out: {tmp_path / "curated"}
"""
    )
    return path


def test_a_run_writes_shards_a_page_and_lists(config: Path, tmp_path: Path) -> None:
    code, text = run(config, "--workers", "1")

    assert code == 0, text
    assert "exact_duplicates" in text
    assert "1 duplicate" in text or "1 " in text
    assert "3 samples in" in text
    out = tmp_path / "curated"
    assert json.loads((out / "shards" / "manifest.json").read_bytes())["samples"] == 3
    assert "Curation of pairs" in (out / "report.html").read_text(encoding="utf-8")
    assert len((out / "dropped.jsonl").read_text().splitlines()) == 1
    code, text = run(config, "--workers", "1")
    assert code == 0
    assert "the run was finished before" in text


def test_json_holds_the_manifest_and_nothing_else(config: Path) -> None:
    result = CliRunner().invoke(cli, ["data", "curate", str(config), "--workers", "1", "--sample", "3", "--json"])
    document = json.loads(result.stdout)

    assert document["counts"]["read"] == 3
    assert document["out"].endswith("curated-sample")
    assert document["sample"] == 3


def test_explain_shows_the_values_of_a_pipeline_and_all_steps_without_one(config: Path) -> None:
    code, text = run(config, "--explain", "steps.0.content=media")
    assert code == 0, text
    assert "content: media (default: media_and_text)" in text

    code, text = run("--explain")
    assert code == 0, text
    assert "text_duplicates" in text
    assert json.loads(run("--explain", "--json")[1])["steps"]


def test_a_run_without_config_is_wrong_usage() -> None:
    code, text = run()
    assert code == 2
    assert "CONFIG: is required" in text


def test_when_no_record_is_left_the_command_fails_and_names_the_page(config: Path, tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_text('{"nothing": 1}\n')
    code, text = run(config, "--workers", "1")
    assert code == 1
    assert "no record is left after the last step" in text
    assert "indexed for training" not in text
    assert (tmp_path / "curated" / "report.html").is_file()


def test_a_stopped_run_can_be_continued() -> None:
    stopped = Stopped(15)
    stopped.command = ("data", "curate")
    assert stopped.exit_code == 75


@pytest.mark.slow
def test_the_pipeline_of_the_guide_removes_the_planted_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = Path(__file__).parents[4] / "recipes" / "curation"
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, recipes / "make_pairs.py", "raw/pairs"], check=True, capture_output=True)
    captions = [json.loads(line)["text"] for line in Path("raw/pairs/captions.jsonl").read_text().splitlines()]

    code, text = run(recipes / "pairs.yaml", "--workers", "1")

    assert code == 0, text
    manifest = json.loads(Path("curated/pairs/curation.json").read_bytes())
    counts = {step["step"]: step["dropped"] for step in manifest["steps"]}
    assert counts["character_ratios"] == {
        "many_special": sum("CLICK" in caption for caption in captions)
    }  # lists of URLs
    assert counts["image_size"] == {"small_side": sum("tiny" in caption for caption in captions)}
    dropped = [json.loads(line) for line in Path("curated/pairs/dropped.jsonl").read_text().splitlines()]
    rows = {int(line["id"].rsplit(":", 1)[1]) for line in dropped if line["step"] == "image_content"}
    assert {row for row, caption in enumerate(captions, 1) if "Nothing but" in caption} <= rows
    assert manifest["counts"]["quarantined"] == sum("ends too early" in caption for caption in captions)
    assert counts["exact_duplicates"]["exact_duplicate"] >= len(captions) - len(set(captions)) - 40
