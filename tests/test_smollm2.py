# SPDX-License-Identifier: Apache-2.0
"""The parts of docs/guides/smollm2.md that need no pretrained model; `nox -s smollm2` runs all of it."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from mindvl_cli.load import load_config
from mindvl_train import RunConfig


@pytest.fixture(scope="module")
def session(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_session", root / "tests" / "smollm2" / "teach.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def blocks(session: ModuleType) -> list[tuple[str, str]]:
    return session.BLOCK.findall(session.PAGE.read_text(encoding="utf-8"))


def test_the_guide_and_the_session_install_the_same_versions(root: Path, session: ModuleType) -> None:
    pins = re.findall(
        r'"([\w-]+==[\d.]+)"', re.findall(r"^SMOLLM2 = (.*)$", (root / "noxfile.py").read_text(), re.M)[0]
    )
    assert len(pins) == 3
    assert f"pip install --no-deps {' '.join(pins)}\n" in session.PAGE.read_text(encoding="utf-8")


def test_the_recipes_of_the_guide_load(blocks: list[tuple[str, str]], tmp_path: Path) -> None:
    recipes = {text.split()[1]: text for language, text in blocks if language == "yaml"}
    assert set(recipes) == {"encoder.yaml", "warmup.yaml"}
    (tmp_path / "encoder.yaml").write_text(recipes["encoder.yaml"])
    config = load_config(tmp_path / "encoder.yaml", RunConfig)
    assert config.schedule.steps > 0
    # The directory that warmup.yaml names is made by an earlier block, so its model is taken from the other recipe.
    directory = "model: {directory: aligned}\ninit: {model: aligned}\n"
    assert directory in recipes["warmup.yaml"]
    (tmp_path / "warmup.yaml").write_text(recipes["warmup.yaml"].replace(directory, "model: {size: tiny}\n"))
    assert load_config(tmp_path / "warmup.yaml", RunConfig).phase == "warmup"


def test_the_images_of_the_guide_have_one_size_and_answers_in_sentences(
    blocks: list[tuple[str, str]], tmp_path: Path
) -> None:
    (script,) = [text for language, text in blocks if language == "python" and "load_digits" in text]
    few = script.replace('{"train": 32000, "test": 200}', '{"train": 60, "test": 20}')
    assert few != script
    subprocess.run([sys.executable, "-c", few], cwd=tmp_path, check=True)
    images = {split: sorted((tmp_path / "images" / split).glob("*/*.png")) for split in ("train", "test")}
    assert {split: len(files) for split, files in images.items()} == {"train": 60, "test": 20}
    for file in images["train"] + images["test"]:
        assert re.fullmatch(r"The image shows [\w ]+\.", file.parent.name)
        assert Image.open(file).size == (56, 56)


def test_a_stopped_session_continues_after_its_last_complete_block(session: ModuleType, tmp_path: Path) -> None:
    page = "```bash\necho first >> log\n```\ntext\n```yaml\n# run.yaml\nsteps: 1\n```\n```bash\ncat run.yaml\n{}\n```\n"
    with pytest.raises(session.ResultError, match="code 7"):
        session.run_page(page.format("exit 7"), tmp_path)

    done = session.run_page(page.format("echo last >> log"), tmp_path)

    assert (tmp_path / "log").read_text() == "first\nlast\n"
    assert [one["block"] for one in done] == ["echo first >> log", "# run.yaml", "cat run.yaml"]
    assert done[-1]["printed"] == "# run.yaml\nsteps: 1\n"


def test_a_changed_block_runs_again_with_all_blocks_after_it(session: ModuleType, tmp_path: Path) -> None:
    page = "```bash\necho {} >> log\n```\n```bash\necho last >> log\n```\n"
    session.run_page(page.format("first"), tmp_path)
    session.run_page(page.format("changed"), tmp_path)
    assert (tmp_path / "log").read_text() == "first\nlast\nchanged\nlast\n"
