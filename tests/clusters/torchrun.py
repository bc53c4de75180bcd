# SPDX-License-Identifier: Apache-2.0
"""The torchrun commands of docs/guides/cluster.md with two agents on two machines, of which one is killed.

`nox -s cluster` runs this file with pytest; plain nox does not, because it takes minutes. The machines are namespaces with
a network between them (machines.py).
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from machines import Machine, cluster, signal_child, wait_until, why_not
from runs import ROOT, assert_equal_bit_for_bit, guide_script, make_shared, process_of_rank_1, progress

PIPELINE, OUT = "recipes/mindvl-8b/pipeline.yaml", "runs/mindvl-8b"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """Two machines, known by the names that the guide uses."""
    if reason := why_not():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("machines")
    with cluster(directory, ("node0", "node1")) as machines:
        with (directory / "hosts").open("a") as hosts:
            hosts.write(f"{machines[0].address} {_manifest_name()}\n")
        yield machines


class Agents:
    """torchrun on both machines, as the guide starts it, with one process per machine instead of eight."""

    def __init__(self, machines: list[Machine], shared: Path, script: str) -> None:
        """Start both agents."""
        self.out, self._machines = shared / OUT, machines
        for old, new in (("--nnodes=16", "--nnodes=2"), ("--nproc-per-node=8", "--nproc-per-node=1")):
            assert old in script
            script = script.replace(old, new)
        self._script = script
        make_shared(shared, PIPELINE)
        self._shared = shared
        self.processes = [self.start(number) for number in range(2)]

    def start(self, number: int) -> "subprocess.Popen[bytes]":
        """Start the agent of a machine."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "VC_TASK_INDEX": str(number)}
        path = self._shared / "mindvl" / "torchrun.sh"
        path.write_text(
            self._script.replace("torchrun --nnodes", "exec torchrun --nnodes").replace("exec exec", "exec")
        )
        return self._machines[number].start("bash", str(path), cwd=path.parent, environment=environment)

    def wait_for_steps(self, number: int) -> None:
        """Wait until this many more steps were trained."""
        reached = progress(self.out) + number
        wait_until(lambda: progress(self.out) >= reached, f"no {number} more steps", timeout_s=600, poll_s=0.2)

    def end(self) -> list[int]:
        """Exit codes of the agents, which end by themselves."""
        return [process.wait(timeout=900) for process in self.processes]


@pytest.fixture(scope="module")
def quiet(machines: list[Machine], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of an undisturbed run."""
    shared = tmp_path_factory.mktemp("quiet")
    agents = Agents(machines, shared, guide_script(shared, "--rdzv-backend=c10d"))
    assert agents.end() == [0, 0]
    return agents.out


def test_with_c10d_a_killed_process_and_a_killed_agent_are_replaced(
    machines: list[Machine], quiet: Path, tmp_path: Path
) -> None:
    agents = Agents(machines, tmp_path, guide_script(tmp_path, "--rdzv-backend=c10d"))
    agents.wait_for_steps(15)
    machines[1].run("kill", "-KILL", process_of_rank_1(agents.out))
    agents.wait_for_steps(5)  # torchrun has restarted both processes
    signal_child(agents.processes[1], signal.SIGKILL)
    assert agents.processes[1].wait(timeout=60) != 0
    agents.processes[1] = agents.start(1)
    assert agents.end() == [0, 0]
    assert_equal_bit_for_bit(quiet, agents.out)


def test_with_static_addresses_a_lost_machine_ends_the_job_and_the_same_commands_resume_it(
    machines: list[Machine], quiet: Path, tmp_path: Path
) -> None:
    script = _manifest_command().replace("/shared/", f"{tmp_path}/")
    agents = Agents(machines, tmp_path, script)
    agents.wait_for_steps(15)
    machines[1].kill()
    assert agents.processes[0].wait(timeout=120) != 0
    agents.processes[1].wait(timeout=60)
    machines[1].boot()
    agents.processes = [agents.start(number) for number in range(2)]  # as Volcano starts all pods again
    assert agents.end() == [0, 0]
    assert_equal_bit_for_bit(quiet, agents.out)


def _manifest_command() -> str:
    """The command of the Kubernetes manifest."""
    text = (ROOT / "docs" / "guides" / "cluster.md").read_text()
    manifest, _ = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (container,) = yaml.safe_load(manifest)["spec"]["tasks"][0]["template"]["spec"]["containers"]
    return str(container["args"][0])


def _manifest_name() -> str:
    """The host name of the first pod in that command."""
    return re.findall(r"--master-addr=(\S+)", _manifest_command())[0]
