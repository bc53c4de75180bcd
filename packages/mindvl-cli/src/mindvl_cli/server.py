# SPDX-License-Identifier: Apache-2.0
"""Start the inference server of an installed engine, wait until it answers, and pass signals to it.

Called by `mindvl serve`. The engine runs as its own program, so that nothing of it is imported here.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import click

from mindvl_cli.extras import require
from mindvl_cli.failures import CliError

_PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_POLL_S = 0.2  # between two health checks


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What to serve, with which engine, and where."""

    model: Path
    engine: str = "auto"  # auto: vllm if it is installed, else transformers
    host: str = "127.0.0.1"
    port: int = 8000
    trust_remote_code: bool = False
    engine_options: tuple[str, ...] = ()  # appended to the command of the engine

    @property
    def url(self) -> str:
        """Base URL of the API as seen from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def chosen_engine(engine: str, *, is_installed: Callable[[str], bool]) -> str:
    """The engine to start.

    Args:
        is_installed: Whether an engine is installed.

    Raises:
        CliError: vLLM was asked for and is not installed.
    """
    has_vllm = is_installed("vllm")
    if engine == "vllm" and not has_vllm:
        raise CliError(
            "--engine: vllm is not installed. Install vLLM in this environment, or in another one whose bin directory is in "
            "PATH, or use --engine transformers."
        )
    return ("vllm" if has_vllm else "transformers") if engine == "auto" else engine


def server_command(config: ServerConfig, engine: str) -> list[str]:
    """The program of the engine and its arguments, which both engines spell alike."""
    start = [sys.executable, "-m", "mindvl_cli.transformers_server"] if engine == "transformers" else [_path(engine)]
    command = [*start, "serve", str(config.model), "--host", config.host, "--port", str(config.port)]
    if config.trust_remote_code:
        command.append("--trust-remote-code")
    return [*command, *config.engine_options]


def run_server(config: ServerConfig) -> int:
    """Run the server until it ends.

    Returns:
        Its exit code; 128 plus the number of the signal that ended it.

    Raises:
        CliError: No installed engine can serve the model, or the port is in use.
    """
    engine = chosen_engine(config.engine, is_installed=_is_installed)
    if engine == "transformers":
        require("serve", "mindvl serve")
        _check_class(config.model)
    _check_port(config)
    command = server_command(config, engine)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}  # serve the directory, download nothing
    click.echo(f"starting {engine} for {config.model}", err=True)
    with _signals_kept() as kept:
        # A session of its own: Ctrl-C reaches it through this process, once. Its logs go to standard error.
        process = subprocess.Popen(command, env=environment, stdout=2, start_new_session=True)
        try:
            return _wait(process, config, kept)
        finally:
            if process.poll() is None:  # an error of ours, such as a closed standard output
                process.terminate()
                process.wait()


def _is_installed(engine: str) -> bool:
    """Whether the engine is in this environment, or its program in the search path."""
    return find_spec(engine) is not None or shutil.which(engine) is not None


def _check_class(model: Path) -> None:
    """Refuse a model class that only the directory has: `transformers serve` runs those of transformers and of MindVL."""
    path = model / "config.json"
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    names = document.get("architectures") or [""]
    if "auto_map" not in document or document.get("model_type") == "mindvl":
        return
    import transformers

    if not hasattr(transformers, names[0]):
        raise CliError(
            f"{path}: transformers has no class {names[0]}, and its server does not run classes of a directory. Install vLLM "
            "and use --engine vllm, or use mindvl chat."
        )


def _wait(process: "subprocess.Popen[bytes]", config: ServerConfig, kept: list[int]) -> int:
    """Pass on signals and announce the server when it answers; returns the exit code."""
    is_ready = False
    while (code := process.poll()) is None:
        while kept:
            process.send_signal(kept.pop(0))
        if not is_ready and _answers(f"{config.url}/health"):
            is_ready = True
            click.echo(f"ready: {config.url}/v1, model {config.model}")
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            continue
    code = 128 - code if code < 0 else code
    if not is_ready:
        click.echo(
            f"mindvl serve: the server ended with exit code {code} before it answered. See its output.", err=True
        )
    return code


@contextmanager
def _signals_kept() -> Iterator[list[int]]:
    """Inside the block signals are put into the list instead of ending this process."""
    kept: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        kept.append(number)

    before = {number: signal.signal(number, keep) for number in _PASSED}
    try:
        yield kept
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _answers(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach this machine
    try:
        with direct.open(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _check_port(config: ServerConfig) -> None:
    """Refuse a port in use: the health check would reach the other server."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise CliError(
            f"--host: {config.host!r} is not an address ({error.strerror}). Use for example 0.0.0.0."
        ) from error
    except OSError as error:
        raise CliError(
            f"--port: cannot listen on {config.host} port {config.port} ({error.strerror}). Choose another port or address."
        ) from error


def _path(program: str) -> str:
    """The program of this Python environment, or of the search path."""
    beside = Path(sys.executable).with_name(program)
    found = str(beside) if beside.is_file() else shutil.which(program)
    if found is None:
        raise CliError(f"mindvl serve: program {program} is not found. Reinstall {program} in this environment.")
    return found
