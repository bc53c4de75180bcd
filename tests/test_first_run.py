# SPDX-License-Identifier: Apache-2.0
"""docs/start/first-run.md, run from top to bottom in an empty directory as a new user would."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "start" / "first-run.md"
BLOCK = re.compile(r"^```(python|bash|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_every_block_of_the_first_run_works(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) >= 8
    # The mindvl command of this environment, and nothing of the user's home.
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
    }
    printed: dict[str, list[str]] = {"python": [], "bash": []}
    for language, text in blocks:
        if language == "yaml":
            (tmp_path / text.split()[1]).write_text(text)
            continue
        command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        printed[language].append(done.stdout)

    images, *_, answer = printed["python"]
    assert images == "288 images\n"
    assert answer.startswith("A photo of "), answer
    assert "0 skipped" in printed["bash"][-1]  # the directory, made into a checkpoint again
    assert "<image" in (tmp_path / "sample.html").read_text()
    lines = [json.loads(line) for line in (tmp_path / "runs/photos/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 30, 40, 50]
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    reference = (PAGE.parents[1] / "reference" / "metrics.md").read_text()
    names = {name for line in lines for name in line}
    assert [name for name in sorted(names) if f"`{name}`" not in reference] == [], (
        "docs/reference/metrics.md lacks these"
    )
