# SPDX-License-Identifier: Apache-2.0
"""What a dry run found, in words."""

from dataclasses import replace

import pytest

from mindvl_cli.dry_run import dry_run_text
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
)
REPORT = DryRun(
    phase="warmup",
    out="runs/w",
    model={
        "family": "deepseek_v3",
        "parameters": {"vision": 636_401_664, "projector": 62_928_128, "language": 682_636_472_320},
        "trained": {"projector": 62_928_128},
        "precision": "bf16",
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
        "rows_per_step": 1024,
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
    start={"resumes": None, "init": {"vision": "tower"}, "from_stage": None, "at_random": ["projector", "language"]},
    data=None,
    problems=("data.tokenizer: gone does not exist. Make it.",),
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
        "1,024 rows of 8,192 tokens, 16 on each data-parallel rank; pipeline bubble 16%",
        "1,907 steps, 16.00B tokens; learning rate 1e-06 at step 1, 0.0002 at step 191, 1e-05 at step 1,907",
        "weights     vision from tower, projector at random, language at random",
        "20 checkpoints of 1.4 TB, up to 4.1 TB at once; 80.0 GB free",
        "operators   npu: attention; torch: adamw",
        "problem     data.tokenizer: gone does not exist. Make it.",
    ],
)
def test_a_run_is_told_in_numbers_a_person_reads(line: str) -> None:
    assert line in dry_run_text("first", REPORT)


def test_a_device_has_its_article() -> None:
    assert "(as on a cpu)" in dry_run_text("first", replace(REPORT, layout=REPORT.layout | {"device": "cpu"}))


def test_where_a_run_begins_is_told() -> None:
    resumed = replace(REPORT, start=REPORT.start | {"resumes": "runs/w/checkpoints/step-00000100"})
    assert "weights     goes on from runs/w/checkpoints/step-00000100" in dry_run_text("first", resumed)
    later = replace(REPORT, start=REPORT.start | {"from_stage": "warmup", "at_random": []})
    assert "weights     all parts from stage warmup" in dry_run_text("first", later)
