# SPDX-License-Identifier: Apache-2.0
"""`mindvl serve` starts the real server of transformers, which uses the image size limits of the directory."""

import base64
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from click.testing import CliRunner
from PIL import Image

from mindvl_cli.commands.serve import serve
from mindvl_cli.processor_limits import apply_limits
from mindvl_ops.runtime.ports import reserved_port


def test_a_directory_without_a_model_is_refused(tmp_path):
    result = CliRunner().invoke(serve, [str(tmp_path)])
    assert result.exit_code == 2
    assert "has no config.json" in result.output


def _prompt_tokens(url: str, model: str, content: list[dict[str, object]]) -> int:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    request = urllib.request.Request(
        f"{url}/chat/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=600) as reply:
        return int(json.load(reply)["usage"]["prompt_tokens"])


@pytest.fixture(scope="session")
def mindvl_directory(tmp_path_factory):
    """A tiny exported MindVL directory, whose class only mindvl-model has."""
    from transformers import AutoTokenizer

    from mindvl_cli.demo.tokenizer import train_tokenizer
    from mindvl_model import for_tokenizer
    from mindvl_model.hf.export import export_hf_directory
    from mindvl_model.hf.processor_files import ProcessorSettings
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_model.megatron.process import single_process
    from mindvl_model.model import MindVLModel
    from mindvl_model.testing.tiny import smallest_config

    directory = tmp_path_factory.mktemp("mindvl")
    tokenizer = train_tokenizer(["read the number"], directory / "tokenizer", vocab_size=300)
    vocabulary = AutoTokenizer.from_pretrained(tokenizer).get_vocab()
    config = for_tokenizer(smallest_config(), vocabulary, len(vocabulary))
    limits = ProcessorSettings(min_pixels=4 * 784, max_pixels=16 * 784)
    with single_process():
        model = MindVLModel(config, BuildConfig())
        export_hf_directory(model, config, directory / "model", tokenizer=tokenizer, processor=limits)
    return directory / "model"


@pytest.fixture
def port():
    """A port that the system assigns to no other process during the test."""
    with reserved_port() as number:
        yield number


@pytest.mark.slow
@pytest.mark.parametrize(("name", "trusted"), [("model_directory", ["--trust-remote-code"]), ("mindvl_directory", [])])
def test_the_served_model_uses_the_applied_limits_and_ends_with_the_exit_code_of_the_server(
    name, trusted, port, request, tmp_path
):
    model = tmp_path / "model"
    shutil.copytree(request.getfixturevalue(name), model)
    apply_limits(model, min_pixels=4 * 784, max_pixels=4 * 784)  # 4 visual tokens; the directory had at most 16
    options = ["--port", str(port), "--engine", "transformers", *trusted, "--", "--device", "cpu"]
    command = [sys.executable, "-m", "mindvl_cli.main", "serve", str(model), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # blocks until the server answers or ends
        assert line == f"ready: http://127.0.0.1:{port}/v1, model {model}\n"
        file = io.BytesIO()
        Image.effect_noise((112, 112), 80).save(file, "PNG")
        data = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        text = {"type": "text", "text": "read"}
        image = {"type": "image_url", "image_url": {"url": data}}
        url = f"http://127.0.0.1:{port}/v1"
        added = _prompt_tokens(url, str(model), [image, text]) - _prompt_tokens(url, str(model), [text])
        assert added == 4 + 2  # the start and the end of the image are tokens too
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(300)
        process.stdout.close()
    assert code == 128 + signal.SIGTERM
    with socket.socket() as attempt:
        assert attempt.connect_ex(("127.0.0.1", port)) != 0
