# SPDX-License-Identifier: Apache-2.0
"""The search over a real processor: equal to evaluating every cell; its files; limits written into a directory."""

import json
import shutil
from pathlib import Path

import pytest

from mindvl_cli.failures import CliError
from mindvl_cli.pages.search import write_search
from mindvl_cli.predictor import make_predictor
from mindvl_cli.processor_limits import apply_limits
from mindvl_merge.evaluation import PredictConfig, ResolutionGrid, evaluate, load_benchmarks, search_model

GRID = ResolutionGrid(min_units=(4, 12), max_units=(8, 16, 64))


def _predictor(directory):
    return make_predictor(directory, config=PredictConfig(), cache=None, trust_remote_code=True)


@pytest.fixture
def predictor(model_directory, monkeypatch):
    """Reads right exactly if the image is larger than ten visual tokens."""
    predictor = _predictor(model_directory)
    asked = []

    def answer(batches):
        for number, questions in enumerate(batches):
            asked.extend(questions)
            sizes = [predictor.sizes(q.item, q.min_pixels, q.max_pixels) for q in questions]
            yield number, ["1" if sum(h * w for h, w in size) > 10 * 784 else "2" for size in sizes], 1.0

    monkeypatch.setattr(predictor, "answer", answer)
    predictor.asked = asked
    return predictor


def test_equal_to_evaluating_every_cell(predictor, benchmark_file):
    benchmarks = load_benchmarks(benchmark_file)
    result = search_model(predictor, benchmarks[0].items, GRID)
    assert len(predictor.asked) == result.num_evaluations < result.num_requests
    for cell in result.cells:
        whole = evaluate(predictor, benchmarks, min_pixels=cell.min_pixels, max_pixels=cell.max_pixels)
        assert cell.score == pytest.approx(whole.scores.overall)
    assert len(predictor.asked) == result.num_evaluations  # the cells were in the cache


@pytest.mark.slow
def test_figures_and_plots_are_written(predictor, benchmark_file, tmp_path):
    result = search_model(predictor, load_benchmarks(benchmark_file)[0].items, GRID)
    files = write_search(result, tmp_path / "out", model="m")
    assert [file.name for file in files] == [
        "resolution.json", "heat_map.png", "heat_map.svg", "box_plot.png", "box_plot.svg", "resolution.html",
    ]  # fmt: skip
    assert all(file.stat().st_size > 1000 for file in files)
    report = json.loads(files[0].read_text())
    assert len(report["cells"]) == 5
    assert report["chosen"]["max_pixels"] in (16 * 784, 64 * 784)
    assert set(report["box_by_task"]) == {"read", "text", "locate", "compare"}


def test_limits_are_written_into_a_copy_or_in_place(model_directory, tmp_path):
    copy = tmp_path / "copy"
    apply_limits(model_directory, min_pixels=784, max_pixels=7840, out=copy)
    assert _predictor(copy).default_limits == (784, 7840)
    assert _predictor(model_directory).default_limits == (4 * 784, 16 * 784)
    apply_limits(copy, min_pixels=1568, max_pixels=7840)
    assert _predictor(copy).default_limits == (1568, 7840)
    with pytest.raises(CliError, match=r"--copy-to: directory .* exists"):
        apply_limits(model_directory, min_pixels=784, max_pixels=7840, out=copy)
    shutil.rmtree(copy)
    (copy / "empty").mkdir(parents=True)
    with pytest.raises(CliError, match="has no image processor"):
        apply_limits(copy, min_pixels=784, max_pixels=7840)


def test_a_copy_that_the_disk_does_not_take_leaves_nothing(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: Path, **options: object) -> None:
        Path(target).mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(CliError, match=r"copy: cannot be written \(No space left on device\)"):
        apply_limits(model_directory, min_pixels=784, max_pixels=7840, out=tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []
