# SPDX-License-Identifier: Apache-2.0
"""The scripts of docs/guides/cluster.md on a real Slurm with two nodes: preempted, out of time, killed, and nodes lost.

`nox -s cluster` runs this file with pytest; plain nox does not, because it takes minutes. slurmctld, slurmd and munge run
in namespaces (machines.py), and their configuration, key and state are in a temporary directory.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machines import Machine, cluster, wait_until, why_not
from runs import assert_equal_bit_for_bit, guide_script, make_shared, process_of_rank_1, progress

PIPELINE, OUT = "recipes/mindvl-671b-a37b/pipeline.yaml", "runs/mindvl-671b"
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
# Nodes as the guide's script needs them, whatever this machine has. cred_expire is also the time before a job that was
# put back starts again, 120 seconds by default; a site's SlurmdTimeout is 300 seconds by default.
CONFIGURATION = """\
ClusterName=mindvl
SlurmctldHost=controller
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=10
ReturnToService=2
GresTypes=npu
NodeName=node[0-1] CPUs=128 Gres=npu:8
PartitionName=train Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


class Slurm:
    """A running Slurm and the commands of its user."""

    def __init__(self, directory: Path, machines: list[Machine], environment: dict[str, str]) -> None:
        self.directory, self._environment = directory, environment
        self._controller, *self.nodes = machines

    def start(self) -> None:
        """Start the daemons on all machines."""
        munge = self.directory / "munge"
        key = munge.with_suffix(".key")
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        words = [f"--{name}-file={munge}.{name}" for name in ("key", "pid", "seed", "log")]
        socket = munge.with_suffix(".socket")
        self._controller.start(
            "munged", "--foreground", "--force", *words, f"--socket={socket}", environment=self._environment
        )
        wait_until(socket.exists, "munged did not start")
        (self.directory / "state").mkdir()
        (self.directory / "slurm.conf").write_text(CONFIGURATION.format(directory=self.directory))
        (self.directory / "gres.conf").write_text("Name=npu Count=8\n")
        self._controller.start("slurmctld", "-D", environment=self._environment)
        started = self._controller.log("slurmctld")
        wait_until(lambda: "Running as primary" in started.read_text(), "slurmctld did not start")
        for node in self.nodes:
            self.start_node(node)

    def start_node(self, node: Machine) -> None:
        """Start slurmd on a node and wait until jobs can run there."""
        node.start("slurmd", "-D", "-N", node.name, environment=self._environment)
        wait_until(lambda: self.state_of(node) == "idle", f"{node.name}: is not idle", timeout_s=60, poll_s=0.5)

    def command(self, *words: str, cwd: Path | None = None) -> str:
        """Output of a command of the user."""
        return self._controller.run(*words, cwd=cwd, environment=self._environment)

    def state_of(self, node: Machine) -> str:
        """State of a node, such as idle or down."""
        return self.command("sinfo", "--noheader", "--partition=train", f"--nodes={node.name}", "--format=%T")

    def job(self, number: str) -> dict[str, str]:
        """Fields of a job."""
        shown = self.command("scontrol", "show", "job", number, "--oneliner")
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm of two nodes, all idle."""
    if missing := [name for name in ("munged", "slurmctld", "slurmd") if shutil.which(name, path=PATH) is None]:
        pytest.skip(f"{', '.join(missing)} not installed (package slurm-wlm of Debian and Ubuntu)")
    if reason := why_not():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("slurm")
    environment = os.environ | {"SLURM_CONF": str(directory / "slurm.conf"), "PATH": PATH, "OMP_NUM_THREADS": "1"}
    with cluster(directory / "machines", ("controller", "node0", "node1")) as machines:
        slurm = Slurm(directory, machines, environment)
        slurm.start()
        yield slurm


class Job:
    """The guide's job with one process on each node, and an output directory of its own."""

    def __init__(self, slurm: Slurm, name: str) -> None:
        """Submit the job."""
        shared = slurm.directory / name
        self._slurm, self._place, self.out = slurm, make_shared(shared, PIPELINE), shared / OUT
        (self._place / "rank.sh").write_text(guide_script(shared, "SLURM_PROCID"))
        (self._place / "pipeline.sbatch").write_text(guide_script(shared, "#SBATCH"))
        # Two processes instead of 1,024; all other options are those of the script.
        options = ["--parsable", "--nodes=2", "--ntasks-per-node=1"]
        self.number = slurm.command("sbatch", *options, "pipeline.sbatch", cwd=self._place)

    def log(self) -> str:
        """What the job has printed."""
        path = self._place / f"slurm-{self.number}.out"
        return path.read_text(errors="replace") if path.is_file() else ""

    def restarts(self) -> int:
        """Number of times that the job was put back into the queue."""
        return int(self._slurm.job(self.number)["Restarts"])

    def wait_for_state(self, state: str) -> None:
        """Wait until the job has this state."""
        self._wait(lambda fields: fields["JobState"] == state, f"did not reach {state}")

    def wait_for_steps(self, number: int) -> None:
        """Wait until the job has trained for this many more steps."""
        reached = progress(self.out) + number
        self._wait(
            lambda fields: fields["JobState"] == "RUNNING" and progress(self.out) >= reached,
            f"did not train {number} steps",
        )

    def wait_for_restart(self, restarts: int) -> None:
        """Wait until the job was put back more often than `restarts`."""
        self._wait(lambda fields: int(fields["Restarts"]) > restarts, "was not put back into the queue")

    def _wait(self, is_so: Callable[[dict[str, str]], bool], otherwise: str) -> None:
        def check() -> bool:
            fields = self._slurm.job(self.number)
            if not is_so(fields):
                assert fields["JobState"] not in ("FAILED", "CANCELLED", "TIMEOUT", "COMPLETED"), self.log()
                return False
            return True

        wait_until(check, f"job {self.number}: {otherwise}", timeout_s=900, poll_s=0.5)


def test_a_job_that_slurm_stops_in_every_way_ends_like_an_undisturbed_one(slurm: Slurm) -> None:
    quiet = Job(slurm, "quiet")
    quiet.wait_for_state("COMPLETED")
    assert quiet.restarts() == 0

    job = Job(slurm, "disturbed")
    job.wait_for_steps(5)
    # Five minutes before the end of its time Slurm sends SIGUSR1, as the script asks. Slurm looks every 30 seconds, so a
    # rank is stopped, and the job waits for it; Slurm continues a stopped process that it signals.
    node = slurm.nodes[1]
    node.run("kill", "-STOP", process_of_rank_1(job.out))
    slurm.command("scontrol", "update", f"JobId={job.number}", "TimeLimit=5")
    job.wait_for_restart(0)
    assert job.log().count("warmup: stopped at step") == 1
    slurm.command("scontrol", "update", f"JobId={job.number}", "TimeLimit=1440")

    job.wait_for_steps(5)  # then a job of higher priority takes the nodes
    restarts, stops = job.restarts(), job.log().count(": stopped at step")
    slurm.command(
        "sbatch", "--wait", "--partition=urgent", "--nodes=2", "--gres=npu:8", "--wrap=true", cwd=slurm.directory
    )
    job.wait_for_restart(restarts)
    assert job.log().count(": stopped at step") == stops + 1

    job.wait_for_steps(15)  # more than between two saves, so that steps are repeated
    restarts = job.restarts()
    node.run("kill", "-KILL", process_of_rank_1(job.out))
    job.wait_for_restart(restarts)
    assert "task 1: Killed" in job.log()

    for node in reversed(slurm.nodes):  # the batch script runs on the first one
        job.wait_for_steps(15)
        restarts = job.restarts()
        node.kill()
        job.wait_for_restart(restarts)
        node.boot()
        slurm.start_node(node)

    job.wait_for_state("COMPLETED")
    assert_equal_bit_for_bit(quiet.out, job.out)
