# SPDX-License-Identifier: Apache-2.0
"""`mindvl search-resolution` chooses, draws and applies."""

import json
import shutil

import pytest
from click.testing import CliRunner
from PIL import Image

from mindvl_cli.commands.search_resolution import search_resolution
from mindvl_merge.evaluation import Predictor


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """A directory whose answers are right from 16 units on."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    size = {"shortest_edge": 784, "longest_edge": 7840}
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": {"size": size}}))
    monkeypatch.setattr(Predictor, "fingerprint", "f")
    monkeypatch.setattr(Predictor, "multiple", 28)
    monkeypatch.setattr(Predictor, "_length", lambda self, question: 1)
    monkeypatch.setattr(Predictor, "sizes", lambda self, item, low, high: ((high, 1),))

    def answer(self, batches):
        """Larger images take longer."""
        for number, batch in enumerate(batches):
            seconds = sum(question.max_pixels / 784 for question in batch)
            yield number, ["2" if q.max_pixels >= 16 * 784 else "1" for q in batch], seconds

    monkeypatch.setattr(Predictor, "answer", answer)
    (tmp_path / "sum.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    return [str(directory), "-b", str(tmp_path / "sum.jsonl"), "--grid", "4,8x8,16,32"]


def test_the_choice_is_printed_drawn_and_applied(arguments, tmp_path):
    out = tmp_path / "out"
    result = CliRunner().invoke(search_resolution, [*arguments, "--out", str(out), "--apply"], catch_exceptions=False)
    assert "min 3136, max 12544 pixels, score 100.0 % (3 evaluations instead of 6)" in result.stdout
    assert (out / "heat_map.png").exists()
    stored = json.loads((tmp_path / "model" / "processor_config.json").read_text())
    assert stored["image_processor"]["size"] == {"shortest_edge": 3136, "longest_edge": 12544}


def test_json_and_copy(arguments, tmp_path):
    copy = tmp_path / "copy"
    result = CliRunner().invoke(
        search_resolution, [*arguments, "--json", "--copy-to", str(copy)], catch_exceptions=False
    )
    assert json.loads(result.stdout)["chosen"]["max_pixels"] == 16 * 784
    assert json.loads((copy / "processor_config.json").read_text())["image_processor"]["size"]["longest_edge"] == 12544


def test_apply_and_copy_exclude_each_other(arguments):
    assert CliRunner().invoke(search_resolution, [*arguments, "--apply", "--copy-to", "x"]).exit_code == 2


@pytest.mark.slow
def test_several_models_are_compared_on_one_page(arguments, tmp_path):
    model, *rest = arguments
    other = tmp_path / "other"
    shutil.copytree(model, other)
    out = tmp_path / "out"
    settings = ["--out", str(out), "--per-benchmark", "--halving"]
    result = CliRunner().invoke(search_resolution, [model, str(other), *rest, *settings], catch_exceptions=False)
    assert result.stdout.count("best: min 3136, max 12544 pixels") == 2
    assert "distinct of 6" in result.stdout
    cells = [line.split("\u2502")[1:-1] for line in result.stdout.splitlines() if "\u2502" in line]
    rows = [[cell.strip() for cell in row] for row in cells]
    assert rows[:2] == [["sum", name, "0.0", "100.0", "100.0", "100.0"] for name in ("model", "other")]
    assert sorted(path.name for path in out.iterdir() if path.suffix != ".jsonl") == [
        "model",
        "other",
        "resolution.html",
    ]
    document = (
        CliRunner().invoke(search_resolution, [model, str(other), *rest, "--json"], catch_exceptions=False).stdout
    )
    assert [one["model"] for one in json.loads(document)["models"]] == [model, str(other)]
    assert json.loads(document)["robustness"]["sum"][model]["minimum"] == 0.0
    front = json.loads(document)["models"][0]["pareto_front_by_seconds"]
    # one batch of three text questions took 8 + 16 + 32 seconds
    assert [(cell["seconds"], cell["score"]) for cell in front] == [(pytest.approx(56 / 3), 1.0)]
    assert CliRunner().invoke(search_resolution, [model, str(other), *rest, "--copy-to", "x"]).exit_code == 2
    assert CliRunner().invoke(search_resolution, [model, model, *rest, "--out", str(out)]).exit_code == 2


def test_a_model_with_larger_visual_tokens_is_searched_in_its_own_unit(qwen3_vl_directory, tmp_path):
    Image.new("RGB", (256, 128), "red").save(tmp_path / "a.png")
    row = {"id": "1", "task": "read", "images": ["a.png"], "question": "<image>\nread", "answer": "1"}
    (tmp_path / "read.jsonl").write_text(json.dumps(row) + "\n")
    out = tmp_path / "out"
    command = [
        str(qwen3_vl_directory),
        "-b",
        str(tmp_path / "read.jsonl"),
        "--grid",
        "1x8,18,64",
        "--max-new-tokens",
        "2",
    ]
    result = CliRunner().invoke(search_resolution, [*command, "--out", str(out), "--json"], catch_exceptions=False)
    cells = json.loads(result.stdout)["cells"]
    assert [cell["max_pixels"] for cell in cells] == [8 * 1024, 18 * 1024, 64 * 1024]
    # 8 x 4 visual tokens of 32 x 32 pixels as it is, 4 x 2 and 6 x 3 reduced to the limits.
    assert [cell["visual_tokens"] for cell in cells] == [8, 18, 32]
    page = (out / "resolution.html").read_text()
    assert "visual tokens of 32x32 pixels" in page
    assert "28x28" not in page
