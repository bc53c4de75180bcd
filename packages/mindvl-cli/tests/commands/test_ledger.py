# SPDX-License-Identifier: Apache-2.0
"""Tests of `mindvl data ledger`: what a run consumed, and whether it is what was planned."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mindvl_cli.commands.data import data
from mindvl_cli.failures import CliError
from mindvl_cli.load import to_plain, to_yaml
from mindvl_data import DataConfig, Loader, PackingConfig, SourceConfig, index_directory, write_shards
from mindvl_model.testing.tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """A source of 40 plain texts and a tokenizer of bytes."""
    root = tmp_path_factory.mktemp("data")
    save_tokenizer(root / "tokenizer")
    (root / "texts.jsonl").write_text("\n".join(json.dumps({"text": "ab " * (n % 7 + 1)}) for n in range(40)))
    write_shards(root / "texts.jsonl", root / "texts", format="text", samples_per_shard=15)
    index_directory(root / "texts")
    return DataConfig(
        sources=(SourceConfig(name="texts", path=root / "texts"),),
        tokenizer=root / "tokenizer",
        packing=PackingConfig(seq_length=64, buffer_size=4),
        max_failed_share=1e-05,  # JSON writes it in a way that YAML 1.1 takes for a text
        num_threads=0,
    )


@pytest.fixture
def run(config: DataConfig, tmp_path: Path) -> Path:
    """The directory of a run of six steps, saved after the fourth, as a training run leaves it."""
    logged = replace(config, audit_log=tmp_path / "audit.jsonl")
    checkpoint = tmp_path / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    with Loader(logged, global_batch_size=2, position_kind="rope") as loader:
        for number in range(1, 13):
            next(loader)
            if number == 8:
                (checkpoint / "ledger.json").write_text(json.dumps(loader.state_dict(), sort_keys=True))
    manifest = {"format": 1, "step": 4, "run": {"data": to_plain(config), "global_batch_size": 2}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def ledger(*arguments: object) -> Result:
    return CliRunner().invoke(data, ["ledger", *map(str, arguments)])


def test_what_was_consumed_is_shown_with_what_a_resume_would_repeat(run: Path) -> None:
    text = ledger(run).stdout
    assert "steps 1 to 6" in text
    assert "12 packs" in text
    assert "newest checkpoint is at step 4; a resumed run repeats the 2 steps after it" in text
    assert "in the data order" not in text
    document: dict[str, Any] = json.loads(ledger(run, "--json").stdout)
    logged = [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]
    assert document["samples"] == sum(len(pack) for line in logged for pack in line["packs"])
    assert (
        document["tokens"] == document["sources"]["texts"]["tokens"] == sum(line["tokens"]["texts"] for line in logged)
    )


def test_a_run_that_followed_the_data_order_verifies(run: Path) -> None:
    result = ledger(run, "--verify")
    assert result.exit_code == 0
    assert "6 of 6 steps were recomputed" in result.stdout
    assert "verified: no sample is missing, repeated or skipped" in result.stdout


def test_samples_that_never_reached_an_update_are_counted_with_their_causes(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]
    counts = [sum(map(len, line["packs"])) for line in lines]
    ranks = [{"packs": [[[*use, "key"] for use in pack]]} for pack in lines[1]["packs"]]
    skipped = {"step": 2, "action": "skipped", "why": "the loss is nan", "ranks": ranks}
    (run / "skipped.jsonl").write_text(json.dumps(skipped) + "\n")
    source, _, shard, pack = lines[2]["packs"][0][0]
    bad = {"step": 3, "source": source, "shard": shard, "sample_index": pack, "key": "k", "reason": "no JPEG"}
    other = dict(zip(("source", "epoch", "shard", "sample_index"), lines[3]["packs"][0][0], strict=True))
    masked = bad | other | {"step": 4, "reason": "failed to decode on another rank of the model-parallel group"}
    (run / "quarantine.rank00000.jsonl").write_text(json.dumps(bad) + "\n" + json.dumps(masked) + "\n")
    manifest = json.loads((run / "checkpoints" / "step-00000004" / "manifest.json").read_text())
    counted = json.dumps(manifest | {"skipped": 1, "placeholders": 2})
    (run / "checkpoints" / "step-00000004" / "manifest.json").write_text(counted)
    result = ledger(run, "--verify")
    assert result.exit_code == 0
    assert (
        f"samples: in the data order {sum(counts)}, consumed {sum(counts)}, trained on {sum(counts[:4]) - counts[1] - 2}, "
        f"skipped {counts[1] + 2} ({counts[1]} in anomalous steps, 1 failed to decode, 1 masked on this rank), "
        f"after the newest checkpoint {sum(counts[4:])}"
    ) in result.stdout
    assert f"but {counts[1] + 2} were skipped and not trained on" in result.stdout
    assert "lost" not in result.stdout

    (run / "quarantine.rank00000.jsonl").unlink()
    result = ledger(run, "--verify")
    assert result.exit_code == 1
    assert "counts 2 samples replaced by placeholders, the quarantine logs list 0" in result.stdout


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"version": 2}', "[" * 100_000, '{"version": ' + "9" * 5000])
def test_a_ledger_that_is_gone_or_no_ledger_is_one_sentence(run: Path, content: str | None) -> None:
    path = run / "checkpoints" / "step-00000004" / "ledger.json"
    path.unlink() if content is None else path.write_text(content)
    result = ledger(run, "--verify")
    assert isinstance(result.exception, CliError)
    assert str(result.exception).startswith(f"{path}: ")


def test_a_lost_step_fails_the_command_and_is_named(run: Path) -> None:
    lines = (run / "audit.jsonl").read_text().splitlines(keepends=True)
    (run / "audit.jsonl").write_text("".join(lines[:2] + lines[3:]))
    result = ledger(run, "--verify")
    assert result.exit_code == 1
    assert "problem: step 3 is missing, the log continues with step 4" in result.stdout
    assert "verification FAILED" in result.stdout
    problems = json.loads(ledger(run, "--verify", "--json").stdout)["verified"]["problems"]
    assert len(problems) == 2
    assert problems[1].startswith("epoch 0 of texts: ")  # its samples are missing there


def test_the_recipe_of_the_run_goes_before_its_newest_checkpoint(run: Path, config: DataConfig) -> None:
    recipe = "global_batch_size: 2\ndata:\n" + "".join(
        f"  {line}\n" for line in to_yaml(replace(config, seed=5)).splitlines()
    )
    (run / "recipe.yaml").write_text(recipe)
    result = ledger(run, "--verify")
    assert result.exit_code == 1
    assert "seed (0 -> 5) changed" in " ".join(result.stdout.split())


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    result = ledger(tmp_path)
    assert isinstance(result.exception, CliError)
    assert "no recipe.yaml and no checkpoint" in str(result.exception)
