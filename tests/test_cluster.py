# SPDX-License-Identifier: Apache-2.0
"""What docs/guides/cluster.md shows can be read by a shell and as YAML, and the options of mindvl in it exist."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from mindvl_cli.commands.train import train
from mindvl_train import signals

FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The page."""
    return (root / "docs" / "guides" / "cluster.md").read_text()


@pytest.fixture(scope="module")
def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of its blocks."""
    return [(language, text) for language, text in FENCE.findall(page) if language != "sh"]


def strings(value: Any) -> Iterator[str]:
    """Every text inside a YAML document."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(inner)


def test_every_block_is_bash_or_yaml_that_can_be_read(blocks: list[tuple[str, str]]) -> None:
    assert {language for language, _ in blocks} == {"bash", "yaml"}
    for language, text in blocks:
        if language == "bash":
            checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
            assert checked.returncode == 0, checked.stderr
        else:
            assert yaml.safe_load(text)["kind"] == "Job"


def test_every_training_command_has_options_that_exist(root: Path, blocks: list[tuple[str, str]]) -> None:
    lines: list[str] = []
    for language, text in blocks:
        joined = text.replace("\\\n", " ").splitlines() if language == "bash" else strings(yaml.safe_load(text))
        lines += [line for line in joined if "mindvl train" in line]
    assert len(lines) == 3
    context = click.Context(train, info_name="train")
    for line in lines:
        words = shlex.split(line.partition("mindvl train")[2])
        values, rest, _ = train.make_parser(context).parse_args(words)
        assert (root / values["recipe"]).is_file(), line
        assert not rest, line


def test_the_exit_codes_are_those_of_the_code(root: Path, blocks: list[tuple[str, str]]) -> None:
    page = (root / "docs" / "guides" / "failures.md").read_text()
    assert f"| {signals.DATA_USED_UP} | all sources reached" in page
    assert f"| {signals.STOPPED} | stopped by SIGTERM" in page
    assert f"| {signals.STUCK} | a process was stuck" in page
    (batch,) = [text for _, text in blocks if "#SBATCH" in text]
    assert set(re.findall(r'"\$code" -eq (\d+)', batch)) == {str(signals.STOPPED), str(signals.STUCK)}


def test_pods_live_longer_than_torchrun_waits_for_a_save(blocks: list[tuple[str, str]]) -> None:
    (job,) = [yaml.safe_load(text) for language, text in blocks if language == "yaml"]
    (task,) = job["spec"]["tasks"]
    pod = task["template"]["spec"]
    (container,) = pod["containers"]
    (waits,) = re.findall(r"--shutdown-timeout=(\d+)", container["args"][0])
    assert pod["terminationGracePeriodSeconds"] > int(waits)
    assert f"--nnodes={task['replicas']} " in container["args"][0]
    assert f"{job['metadata']['name']}-{task['name']}-0.{job['metadata']['name']} " in container["args"][0]
