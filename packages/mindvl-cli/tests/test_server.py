# SPDX-License-Identifier: Apache-2.0
"""The engine is chosen by what is installed, and its server gets the signals and gives the exit code."""

import json
import socket
import sys
from pathlib import Path

import pytest

from mindvl_cli.failures import CliError
from mindvl_cli.server import ServerConfig, chosen_engine, run_server, server_command
from mindvl_ops.runtime.ports import reserved_port


def test_vllm_is_started_where_it_is_installed_and_transformers_otherwise():
    assert chosen_engine("auto", is_installed=lambda name: name == "vllm") == "vllm"
    assert chosen_engine("auto", is_installed=lambda name: False) == "transformers"
    assert chosen_engine("transformers", is_installed=lambda name: True) == "transformers"
    with pytest.raises(CliError, match="--engine: vllm is not installed"):
        chosen_engine("vllm", is_installed=lambda name: False)


def test_the_command_has_the_address_and_the_options_of_the_engine_last(tmp_path, monkeypatch):
    (tmp_path / "vllm").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = ServerConfig(model=Path("m"), port=81, trust_remote_code=True, engine_options=("--max-model-len", "9"))
    program = str(tmp_path / "vllm")
    assert server_command(config, "vllm") == [
        program, "serve", "m", "--host", "127.0.0.1", "--port", "81", "--trust-remote-code", "--max-model-len", "9",
    ]  # fmt: skip
    transformers = server_command(config, "transformers")
    assert transformers[:5] == [sys.executable, "-m", "mindvl_cli.transformers_server", "serve", "m"]


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000"), ("node1", "http://node1:8000")],
)
def test_the_url_can_be_opened_on_this_machine(host, url):
    assert ServerConfig(model=Path("m"), host=host).url == url


@pytest.fixture
def port():
    """A port that the system assigns to no other process during the test."""
    with reserved_port() as number:
        yield number


def test_a_port_in_use_is_refused_before_a_server_is_started(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CliError, match=f"cannot listen on 127.0.0.1 port {port}"):
            run_server(ServerConfig(model=tmp_path, engine="transformers", port=port))


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_exit_code_is_that_of_the_server(tmp_path, monkeypatch, capsys, port, script, code):
    monkeypatch.setattr("mindvl_cli.server.server_command", lambda *_: ["sh", "-c", script])
    assert run_server(ServerConfig(model=tmp_path, engine="transformers", port=port)) == code
    assert f"ended with exit code {code} before it answered" in capsys.readouterr().err


def test_a_signal_is_passed_to_the_server(tmp_path, monkeypatch, port):
    script = "trap 'exit 5' TERM; kill -TERM $PPID; while :; do sleep 0.05; done"
    monkeypatch.setattr("mindvl_cli.server.server_command", lambda *_: ["sh", "-c", script])
    assert run_server(ServerConfig(model=tmp_path, engine="transformers", port=port)) == 5


def test_an_error_of_this_process_ends_the_server_too(tmp_path, monkeypatch, port):
    def fail(url):
        if (tmp_path / "ready").exists():
            raise BrokenPipeError
        return False

    script = f"cd {tmp_path}; trap 'touch ended; exit' TERM; touch ready; while :; do sleep 0.05; done"
    monkeypatch.setattr("mindvl_cli.server.server_command", lambda *_: ["sh", "-c", script])
    monkeypatch.setattr("mindvl_cli.server._answers", fail)
    with pytest.raises(BrokenPipeError):
        run_server(ServerConfig(model=tmp_path, engine="transformers", port=port))
    assert (tmp_path / "ended").exists()


def test_a_class_that_only_the_directory_has_is_refused_for_the_server_of_transformers(tmp_path, port):
    name = "OtherForConditionalGeneration"
    auto_map = {"AutoModelForImageTextToText": f"modeling_other.{name}"}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "auto_map": auto_map}))
    with pytest.raises(CliError, match=f"transformers has no class {name}.* use mindvl chat"):
        run_server(ServerConfig(model=tmp_path, engine="transformers", port=port))
