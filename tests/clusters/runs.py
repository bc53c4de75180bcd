# SPDX-License-Identifier: Apache-2.0
"""A shared directory with data and recipes as docs/guides/cluster.md assumes it, and the comparison of two runs.

Used by slurm.py and torchrun.py. The scripts are the text of the guide, with `/shared` replaced by a directory of the test.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

ROOT = Path(__file__).parents[2]
STAGES = ("warmup", "multitask")
STEPS = 80
_SETTINGS = [f"schedule.steps={STEPS}", "global_batch_size=2", "checkpoints.every_steps=10", "metrics.every_steps=1"]
_BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def make_shared(shared: Path, pipeline: str, *settings: str) -> Path:
    """Fill `shared/mindvl` with data and two stages of the tiny recipes, under the name that the guide's pipeline has.

    Args:
        pipeline: Pipeline file of the guide, relative to the working directory.
        settings: KEY=VALUE for both training stages.

    Returns:
        The working directory.
    """
    place = shared / "mindvl"
    place.mkdir(parents=True)
    text = (ROOT / "docs" / "guides" / "train.md").read_text()
    (script,) = re.findall(r"## Data for the tiny recipes\n.*?```python\n(.*?)```", text, re.DOTALL)
    subprocess.run([sys.executable, "-c", script], cwd=place, check=True)
    file = place / pipeline
    file.parent.mkdir(parents=True)
    for name in STAGES:
        shutil.copyfile(ROOT / "recipes" / "tiny" / f"{name}.yaml", file.parent / f"{name}.yaml")
    overrides = {"overrides": [*_SETTINGS, *settings]}
    stages = [{"name": name, "recipe": f"{name}.yaml", **overrides} for name in STAGES]
    stages[1]["start_from"] = "warmup"
    file.write_text(json.dumps({"out": "runs", "stages": stages}))  # JSON is YAML
    return place


def guide_script(shared: Path, having: str) -> str:
    """The bash block of the guide that has a text, with `/shared` replaced."""
    blocks = _BASH.findall((ROOT / "docs" / "guides" / "cluster.md").read_text())
    (block,) = [block for block in blocks if having in block]
    return str(block).replace("/shared/", f"{shared}/")


def progress(out: Path) -> int:
    """Steps of all stages that were reported so far."""
    return sum(len(_loss_trace(out / stage)) for stage in STAGES)


def process_of_rank_1(out: Path) -> str:
    """Process id of rank 1 on its machine, from the heartbeat of the stage that is training."""
    beats = [out / stage / "heartbeat" / "rank-0001.json" for stage in STAGES]
    newest = max((beat for beat in beats if beat.is_file()), key=lambda beat: beat.stat().st_mtime)
    return str(json.loads(newest.read_text())["pid"])


def assert_equal_bit_for_bit(quiet: Path, disturbed: Path) -> None:
    """Check that losses, data order, and the tensors of the last checkpoint are equal in every stage."""
    for stage in STAGES:
        ours, theirs = quiet / stage, disturbed / stage
        trace = _loss_trace(ours)
        assert [row["step"] for row in trace] == list(range(1, STEPS + 1))
        assert _loss_trace(theirs) == trace
        assert _data_order(theirs) == _data_order(ours)
        last = Path("checkpoints") / f"step-{STEPS:08d}"
        digests = _digests(ours / last)
        assert len(digests) > 10
        assert _digests(theirs / last) == digests


def _loss_trace(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{key: row[key] for key in ("step", "loss", "grad_norm", "learning_rate", "loss_tokens")} for row in rows]


def _data_order(out: Path) -> list[Any]:
    rows = [json.loads(line) for line in (out / "audit.jsonl").read_text().splitlines()]
    return [(row["step"], row["packs"]) for row in rows]


def _digests(checkpoint: Path) -> dict[str, str]:
    """A digest of the bytes of every tensor (weights and optimizer states), read by torch alone."""
    reader = torch_checkpoint.FileSystemReader(checkpoint / "tensors")
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    torch_checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return {name: hashlib.sha256(one.flatten().view(torch.uint8).numpy()).hexdigest() for name, one in tensors.items()}
