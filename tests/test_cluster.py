# SPDX-License-Identifier: Apache-2.0
"""What docs/guides/cluster.md shows can be read by a shell and as YAML, fits its schemas, and has options that exist.

`nox -s cluster` runs the same scripts (tests/clusters).
"""

import copy
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import kubernetes_validate
import pytest
import yaml

from mindvl_cli.commands.train import train
from mindvl_train import signals

FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
KUBERNETES = "1.37"
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
COUNT = {"type": "integer", "minimum": 0}
POLICIES = {
    "type": "array",
    "items": {
        "type": "object",
        "additionalProperties": False,
        "required": ["action"],
        "properties": {
            "event": {
                "enum": ["*", "PodPending", "PodRunning", "PodFailed", "PodEvicted", "TaskCompleted", "TaskFailed"]
            },
            "action": {"enum": ["AbortJob", "RestartJob", "RestartTask", "RestartPod", "TerminateJob", "CompleteJob"]},
            "exitCode": {"type": "integer"},
            "timeout": {"type": "string"},
        },
    },
}
# The fields of a Volcano Job (batch.volcano.sh/v1alpha1) that a training job may need, written by hand from the
# definition in release 1.14; no Python package ships it. Pods inside it are checked against the schemas of Kubernetes.
VOLCANO_JOB = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "batch.volcano.sh/v1alpha1"},
        "kind": {"const": "Job"},
        "metadata": {"type": "object", "required": ["name"], "properties": {"name": NAME}},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["schedulerName", "minAvailable", "tasks"],
            "properties": {
                "schedulerName": {"const": "volcano"},
                "minAvailable": COUNT,
                "maxRetry": COUNT,
                "queue": NAME,
                "priorityClassName": NAME,
                "ttlSecondsAfterFinished": COUNT,
                "plugins": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "string"}}},
                "policies": POLICIES,
                "tasks": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["name", "replicas", "template"],
                        "properties": {
                            "name": NAME,
                            "replicas": COUNT,
                            "minAvailable": COUNT,
                            "maxRetry": COUNT,
                            "policies": POLICIES,
                            "template": {"type": "object"},
                        },
                    },
                },
            },
        },
    },
}


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
            assert isinstance(yaml.safe_load(text), dict)


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


@pytest.fixture(scope="module")
def manifests(blocks: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The job for GPUs, and the job for NPUs: the same with the lines for NPUs merged."""
    gpus, changes = [yaml.safe_load(text) for language, text in blocks if language == "yaml"]
    npus = merged(gpus, changes)
    del npus["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    return [gpus, npus]


def merged(document: Any, changes: Any) -> Any:
    """A document with changes inside its mappings and at the same places of its lists."""
    if isinstance(document, dict) and isinstance(changes, dict):
        old, new = document.items(), changes.items()
        return dict(old) | {key: merged(document[key], value) if key in document else value for key, value in new}
    if isinstance(document, list) and isinstance(changes, list):
        return [merged(*pair) for pair in zip(document, changes, strict=True)]
    return changes


def check_manifest(job: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError if a Volcano Job or one of its pods does not fit its schema."""
    jsonschema.validate(job, VOLCANO_JOB)
    for task in job["spec"]["tasks"]:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {}, **task["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_manifests_fit_the_schemas(manifests: list[dict[str, Any]]) -> None:
    for job in manifests:
        check_manifest(job)
    (container,) = manifests[1]["spec"]["tasks"][0]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"huawei.com/Ascend910": 8}
    assert container["args"] == manifests[0]["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ("spec", "minAvailble", 16),
        ("spec", "maxRetry", "20"),
        ("spec.policies.0", "event", "PodFail"),
        ("spec.tasks.0", "replica", 16),
        ("spec.tasks.0.template.spec", "terminationGracePeriodSecond", 660),
        ("spec.tasks.0.template.spec", "restartPolicy", ["Never"]),
        ("spec.tasks.0.template.spec.containers.0", "command", "bash -c"),
        ("spec.tasks.0.template.spec.containers.0.resources", "limit", {"nvidia.com/gpu": 8}),
        ("spec.tasks.0.template.spec.volumes.1.emptyDir", "medium", 64),
    ],
)
def test_a_planted_error_in_a_manifest_is_found(
    manifests: list[dict[str, Any]], path: str, key: str, value: object
) -> None:
    job = copy.deepcopy(manifests[0])
    place: Any = job
    for name in path.split("."):
        place = place[int(name)] if isinstance(place, list) else place[name]
    place[key] = value
    with pytest.raises(jsonschema.ValidationError) as error:
        check_manifest(job)
    assert key in str(error.value.message) + str(list(error.value.path))


def test_pods_live_longer_than_torchrun_waits_for_a_save(manifests: list[dict[str, Any]]) -> None:
    job = manifests[0]
    (task,) = job["spec"]["tasks"]
    pod = task["template"]["spec"]
    (container,) = pod["containers"]
    (waits,) = re.findall(r"--shutdown-timeout=(\d+)", container["args"][0])
    assert pod["terminationGracePeriodSeconds"] > int(waits)
    assert f"--nnodes={task['replicas']} " in container["args"][0]
    assert f"{job['metadata']['name']}-{task['name']}-0.{job['metadata']['name']} " in container["args"][0]
