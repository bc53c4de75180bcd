# SPDX-License-Identifier: Apache-2.0
"""What a dry run found, in words; whatever value a recipe gives to a field, it is answered in a sentence, quickly."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from mindvl_cli.failures import is_ours
from mindvl_cli.load import load_config, to_plain
from mindvl_cli.main import cli
from mindvl_cli.pages.dry_run_text import dry_run_text
from mindvl_model import MindVLConfig
from mindvl_model.families.qwen2 import Qwen2Preset
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen3_moe
from mindvl_train import RunConfig
from mindvl_train.dry_run import DryRun, StageCounts

MIDDLE = StageCounts(
    rank=64,
    layers=(4,),
    has_vision=False,
    has_head=False,
    parameters=988_610_560,
    trained=988_610_560,
    weight_bytes=1_977_221_120,
    gradient_bytes=3_954_442_240,
    optimizer_bytes=8_668_692_480,
    activation_bytes=5_120_000_000,
    host_activation_bytes=0,
)
REPORT = DryRun(
    phase="warmup",
    out="runs/w",
    model={
        "family": "deepseek_v3",
        "parameters": {"vision": 636_401_664, "projector": 62_928_128, "language": 682_636_472_320},
        "trained": {"projector": 62_928_128},
        "precision": "bf16",
        "precision_reason": " (as the weights of models/deepseek)",
    },
    layout={
        "processes": 256,
        **{"tp_size": 1, "pp_size": 4, "cp_size": 1, "ep_size": 64, "dp_size": 64},
        "groups_of_rank_0": {"tp": [0], "pp": [0, 64, 128, 192], "cp": [0], "ep": [0, 1], "dp": [0, 3, 4]},
        "microbatches": 16,
        "pipeline_bubble": 3 / 19,
        "recompute": "full",
        "device": "npu",
    },
    stages=(
        replace(MIDDLE, rank=0, layers=(3,), has_vision=True),
        MIDDLE,
        replace(MIDDLE, rank=128, activation_bytes=2_560_000_000),
        replace(MIDDLE, rank=192, has_head=True),
    ),
    schedule={
        "steps": 1907,
        "learning_rate": {1: 1e-6, 191: 2e-4, 1907: 1e-5},
        "global_batch_size": 1024,
        "seq_length": 8192,
        "tokens": 15_997_075_456,
    },
    checkpoints={
        "written": 20,
        "bytes": 1_367_000_000_000,
        "at_once": 3,
        "bytes_at_once": 4_101_000_000_000,
        "free_bytes": 80_000_000_000,
    },
    operators={"attention": "npu", "adamw": "torch"},
    start={
        "resumes": None,
        "init": {"vision": "models/vit"},
        "from_stage": None,
        "at_random": ["projector", "language"],
        "reads": None,
    },
    rehearsal={"found": [], "num_ranks": 4, "work_s": 600.0},
    data=None,
    warnings=(),
    problems=("data.tokenizer: gone does not exist. Create it.",),
)


@pytest.mark.parametrize(
    "line",
    [
        "first: warmup into runs/w",
        "vision 636.40M (frozen), projector 62.93M, language 682.64B (frozen); trained 62.93M of 683.34B",
        "256 processes: tp 1 pp 4 cp 1 ep 64 dp 64; recompute full",
        "tp 0; pp 0 to 192 by 64; cp 0; ep 0, 1; dp 0, 3, 4",
        "stages      0: 3 layers with vision and projector; on each rank 988.61M parameters",
        "stages      1, 2: 4 layers; on each rank 988.61M parameters, weights 2.0 GB, gradients 4.0 GB, optimizer 8.7",
        "optimizer 8.7 GB, activations 2.6 GB to 5.1 GB (as on an npu)\n",
        "stages      3: 4 layers with head;",
        "1,024 packs of 8,192 tokens, 16 on each data-parallel rank; pipeline bubble 16%",
        "1,907 steps, 16.00B tokens; learning rate 1e-06 at step 1, 0.0002 at step 191, 1e-05 at step 1,907",
        "weights     vision from models/vit, projector randomly initialized, language randomly initialized",
        "20 checkpoints of 1.4 TB, up to 4.1 TB at once; 80.0 GB free",
        "operators   npu: attention; torch: adamw",
        "problem     data.tokenizer: gone does not exist. Create it.",
    ],
)
def test_a_run_is_reported_in_numbers_a_person_reads(line: str) -> None:
    assert line in dry_run_text("first", REPORT)


def test_a_validation_is_reported_with_what_follows_from_it() -> None:
    facts = {
        "samples": {"pages": 1200, "text": 80},
        "every_steps": 500,
        "max_packs": 64,
        "measure": "pages",
        "patience": 3,
        "keep_best": True,
    }
    expected = (
        "  validation  every 500 steps and at the last one: pages 1,200 samples, text 80 samples, the first 64 packs; the best "
        "checkpoint by the loss of pages is kept; the run ends after 3 validations in succession without a lower loss"
    )
    assert expected in dry_run_text("w", replace(REPORT, validation=facts)).splitlines()


def test_a_device_has_its_article() -> None:
    assert "(as on a cpu)" in dry_run_text("first", replace(REPORT, layout=REPORT.layout | {"device": "cpu"}))


def test_where_a_run_begins_is_reported() -> None:
    resumed = replace(REPORT, start=REPORT.start | {"resumes": "runs/w/checkpoints/step-00000100"})
    assert "weights     resumes from runs/w/checkpoints/step-00000100" in dry_run_text("first", resumed)
    later = replace(REPORT, start=REPORT.start | {"from_stage": "warmup", "at_random": []})
    assert "weights     all parts from stage warmup" in dry_run_text("first", later)


def test_a_rehearsal_of_the_same_recipe_and_version_is_shown_with_its_result() -> None:
    found = {"path": "runs/w/rehearsal/910b2-256", "device": "910b2", "sentence": "fits: 40 GB.", "is_current": True}
    text = dry_run_text("first", replace(REPORT, rehearsal=REPORT.rehearsal | {"found": [found]}))
    assert "  rehearsal   910b2, fits: 40 GB (runs/w/rehearsal/910b2-256)\n" in text


def test_without_a_rehearsal_of_this_version_its_duration_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 s of work on two cores."""
    monkeypatch.setattr("mindvl_cli.pages.dry_run_text.num_cores", lambda: 2)
    wanted = "  rehearsal   none of this recipe and version; mindvl rehearse takes about 5 min here (4 ranks)\n"
    assert wanted in dry_run_text("first", REPORT)
    found = {"path": "x", "device": "910b2", "sentence": "fits.", "is_current": False}
    older = dry_run_text("first", replace(REPORT, rehearsal=REPORT.rehearsal | {"found": [found]}))
    assert "the one found was made by other versions" in older


RECIPE = Path(__file__).parents[4] / "recipes" / "tiny" / "sft.yaml"
QWEN2 = Qwen2Preset(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=40,
    vocab_size=512,
    mrope_sections=(2, 1, 1),
).decoder()
VALUES = (
    *("0", "-1", "3", "1000003", "1000000000000", f"1{'0' * 30}", "1e22", "0.5", "-0.5", ".nan", ".inf", "-.inf"),
    *(
        '""',
        "x",
        "[]",
        "{}",
        "null",
        "true",
        "[[]]",
        "[0]",
        "[-1]",
        "/dev/null/x",
        '"a\\0b"',
        "!!binary eA==",
        "&a [*a]",
    ),
)
ROUNDS = 60


@pytest.fixture(scope="module")
def documents(tiny_place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The tiny recipe with every field written out, for each family of language models."""
    out = tmp_path_factory.mktemp("values") / "run"
    overrides = ["init={}", f"out={out}", "data.num_threads=0", "data.packing.buffer_size=8"]
    plain = to_plain(load_config(RECIPE, RunConfig, overrides))
    models: dict[str, MindVLConfig] = {
        "qwen3": smallest_config(vocab_size=512),
        "qwen3_moe": smallest_qwen3_moe(vocab_size=512),
        "deepseek_v3": smallest_deepseek_v3(vocab_size=512),
    }
    sections = {
        name: {"size": None, "directory": None, "vision": to_plain(model.vision), "language": to_plain(model.language)}
        for name, model in models.items()
    }
    sections["qwen2"] = sections["qwen3"] | {"language": to_plain(QWEN2)}
    return {name: plain | {"model": section} for name, section in sections.items()}


def key_paths(node: Any) -> Iterator[str]:
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        yield str(key)
        yield from (f"{key}.{below}" for below in key_paths(value))


def dry_run(document: dict[str, Any], override: str, place: Path, directory: Path) -> Result:
    recipe = directory / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(document))
    return CliRunner().invoke(cli, ["train", str(recipe), "--dry-run", override])


def is_answered(result: Result) -> bool:
    """Whether it was a report, or one error for the user."""
    error = result.exception
    if error is None or isinstance(error, SystemExit):
        return result.exit_code in (0, 1)
    return is_ours(error) or isinstance(error, click.ClickException)


@pytest.mark.slow
def test_any_value_of_any_field_is_answered(
    documents: dict[str, dict[str, Any]], tiny_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_place)
    choose = random.Random(11)
    for _ in range(ROUNDS):
        document = documents[choose.choice(sorted(documents))]
        override = f"{choose.choice(sorted(key_paths(document)))}={choose.choice(VALUES)}"
        result = dry_run(document, override, tiny_place, tmp_path)
        assert is_answered(result), (override, result.exc_info)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.language.num_heads=0", "num_heads: must be between 1 and"),
        ("model.vision.num_heads=0", "num_heads: must be between 1 and"),
        ("model.language.hidden_size=-64", "hidden_size: must be between 1 and"),
        ("seed=1e22", "seed: 1e+22 is not valid. Write an integer"),
        ("seed=-1", "seed: must be between 0 and"),
        ("data.seed=-1", "seed: must be between 0 and"),
        ("parallel.pp_size=100", "leaves pipeline stages without any of the 2 language layers"),
        ("parallel.ep_size=1000000", "not divisible by dp_size=1000000"),
        ("global_batch_size=100000000000", "global_batch_size: must be between 1 and 1,048,576"),
        ("data.packing.pad_multiple=0", "pad_multiple: must be between 1 and"),
        ("data.packing.balance_steps=1000003", "balance_steps: must be between 1 and 1024, got 1000003"),
        ("data.sources.0.weight=.inf", "weight: inf is not a finite number"),
        ("faults.stuck_after_s=-1", "faults.stuck_after_s: must be between 0"),
        ("model.vision.in_channels=4", "in_channels: must be 3"),
    ],
)
def test_what_was_a_traceback_or_took_for_ever_is_one_sentence(
    documents: dict[str, dict[str, Any]],
    tiny_place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    message: str,
) -> None:
    monkeypatch.chdir(tiny_place)
    result = dry_run(documents["qwen3"], override, tiny_place, tmp_path)
    assert is_answered(result)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("key", "value"),
    [("out", "FILE"), ("out", "FILE/below"), ("data.audit_log", "DIRECTORY"), ("data.quarantine_log", "FILE/log")],
)
def test_a_place_that_cannot_be_written_is_a_problem_of_the_dry_run(
    documents: dict[str, dict[str, Any]],
    tiny_place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    value: str,
) -> None:
    monkeypatch.chdir(tiny_place)
    (tmp_path / "FILE").write_text("")
    (tmp_path / "DIRECTORY").mkdir()
    result = dry_run(documents["qwen3"], f"{key}={tmp_path / value}", tiny_place, tmp_path)
    assert result.exit_code == 1
    assert f"{key}: {tmp_path / value} is not writable: " in result.output


@pytest.mark.slow
def test_the_largest_step_is_estimated_from_its_first_packs(
    documents: dict[str, dict[str, Any]], tiny_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_place)
    result = dry_run(documents["qwen3"], "global_batch_size=1048576", tiny_place, tmp_path)
    assert result.exit_code == 0, result.exception
    assert "1,048,576 packs" in result.output
