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


def test_a_directory_without_a_model_is_refused(tmp_path):
    result = CliRunner().invoke(serve, [str(tmp_path)])
    assert result.exit_code == 2
    assert "has no config.json" in result.output


def _prompt_tokens(url: str, model: str, content: list[dict[str, object]]) -> int:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    request = urllib.request.Request(
        f"{url}/chat/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
        return int(json.load(reply)["usage"]["prompt_tokens"])


@pytest.mark.slow
def test_the_served_model_uses_the_applied_limits_and_ends_with_the_exit_code_of_the_server(model_directory, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(model_directory, model)
    apply_limits(model, min_pixels=4 * 784, max_pixels=4 * 784)  # 4 visual tokens; the directory had at most 16
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--engine", "transformers", "--trust-remote-code", "--", "--device", "cpu"]
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
        code = process.wait(30)
        process.stdout.close()
    assert code == 128 + signal.SIGTERM
    with socket.socket() as attempt:
        assert attempt.connect_ex(("127.0.0.1", port)) != 0
