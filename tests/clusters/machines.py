# SPDX-License-Identifier: Apache-2.0
"""Machines of a small cluster on this machine: each has its own network, host name, processes and mounts (namespaces).

Used by slurm.py and torchrun.py. The first process of a machine is process 1 of its namespaces, so killing it kills all
processes of the machine at once, like a power failure. Nothing outside the namespaces changes except the files that
processes write, and everything ends with the calling process.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

_TOOLS = ("ip", "mount", "nsenter", "setpriv", "unshare")
_UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
# The first process ignores SIGCHLD, so that the kernel removes orphans that have ended.
_FIRST = (
    'mount --bind "$1" /etc/hosts && hostname "$2" && ip link set lo up && exec env --ignore-signal=CHLD sleep infinity'
)
_TRY = "ip link add mindvl0 type bridge && ip link add mindvl1 type veth peer name mindvl2"


def why_not() -> str | None:
    """Why machines cannot be made here; None if they can."""
    if sys.platform != "linux":
        return f"namespaces exist on Linux only, and this is {sys.platform}"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed (packages util-linux and iproute2)"
    result = subprocess.run([*_UNSHARE, "sh", "-c", _TRY], capture_output=True, text=True, check=False)
    return f"namespaces are not permitted: {result.stderr.strip()}" if result.returncode else None


class Machine:
    """One machine of a cluster, on or off."""

    def __init__(self, name: str, address: str, hosts: Path, logs: Path, switch: "Machine | None") -> None:
        """Describe a machine; without `switch` it is the switch that connects the others."""
        self.name, self.address, self._hosts, self._logs, self._switch = name, address, hosts, logs, switch
        self._parent: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        """Start the machine and connect it to the switch."""
        assert self._parent is None, f"{self.name}: is on"
        # The kernel ends the machine when the calling process ends.
        command = ["setpriv", "--pdeathsig", "KILL", *_UNSHARE]
        self._parent = subprocess.Popen([*command, "sh", "-c", _FIRST, "sh", str(self._hosts), self.name])
        wait_until(self._is_up, f"{self.name}: did not start")
        if self._switch is None:
            device = "bridge0"
            self.run("ip", "link", "add", device, "type", "bridge")
        else:
            device, port = "eth0", f"to-{self.name}"
            # From this machine's view of processes, because the switch has no number for the other machine.
            enter = ["nsenter", "--target", str(self._switch.first_process()), "--net"]
            pair = [
                "ip",
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                device,
                "netns",
                str(self.first_process()),
            ]
            subprocess.run([*enter, *pair], check=True)
            self._switch.run("ip", "link", "set", port, "master", "bridge0", "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", device)
        self.run("ip", "link", "set", device, "up")

    def kill(self) -> None:
        """Kill all processes of the machine at once; none of them can handle it."""
        if self._parent is not None:
            self._parent.kill()
            self._parent.wait()
            self._parent = None

    def run(self, *command: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
        """Output of a command on the machine, which must succeed."""
        result = subprocess.run(self._on(command, cwd), env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{self.name}: {' '.join(command)}: {result.stdout}{result.stderr}"
        return result.stdout.strip()

    def start(
        self, *command: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command on the machine; its output is appended to `log` of its first word."""
        with self.log(command[0]).open("ab") as log:
            return subprocess.Popen(
                self._on(command, cwd), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def log(self, word: str) -> Path:
        """The file with the output of commands that `start` started by this word."""
        return self._logs / f"{self.name}-{Path(word).name}.log"

    def first_process(self) -> int:
        """Id of the machine's first process, as this process sees it."""
        assert self._parent is not None, f"{self.name}: is off"
        (first,) = _children(self._parent.pid)
        return first

    def _on(self, command: tuple[str, ...], cwd: Path | None) -> list[str]:
        enter = ["nsenter", "--target", str(self.first_process()), "--net", "--uts", "--mount", "--pid"]
        return [*enter, "env", f"--chdir={cwd or self._logs}", *command]

    def _is_up(self) -> bool:
        assert self._parent is not None
        assert self._parent.poll() is None, f"{self.name}: ended with {self._parent.returncode}"
        children = _children(self._parent.pid)
        return bool(children) and Path(f"/proc/{children[0]}/cmdline").read_bytes().startswith(b"sleep\0")


@contextmanager
def cluster(directory: Path, names: tuple[str, ...]) -> Iterator[list[Machine]]:
    """Machines of these names in one network, which know each other's addresses; the first is also the switch."""
    addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=1)}
    hosts, logs = directory / "hosts", directory / "logs"
    logs.mkdir(parents=True)
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in addresses.items()))
    machines: list[Machine] = []
    with ExitStack() as stack:
        for name, address in addresses.items():
            machines.append(Machine(name, address, hosts, logs, machines[0] if machines else None))
            stack.callback(machines[-1].kill)
            machines[-1].boot()
        yield machines


def wait_until(is_so: Callable[[], bool], otherwise: str, *, timeout_s: float = 30, poll_s: float = 0.05) -> None:
    """Wait for a condition; fails with the message when it does not hold in time."""
    limit = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < limit, f"{otherwise} within {timeout_s:.0f} s"
        time.sleep(poll_s)


def signal_child(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """Send a signal to the command that `Machine.start` started, which is a child of the returned process."""
    for child in _children(process.pid):
        os.kill(child, number)


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
