# SPDX-License-Identifier: Apache-2.0
"""Tests of the page of the study."""

import json
from pathlib import Path

from mindvl_cli.demo.study import IMAGE_TASKS, TEST_TASKS, Cell, ModelScores, SeedScores
from mindvl_cli.demo.study_report import plots, table, write_study


def _model(name: str, scores: tuple[float, ...]) -> ModelScores:
    return ModelScores(
        model=name,
        test=dict.fromkeys(TEST_TASKS, scores[0]),
        chosen=(784, 7840),
        cells=tuple(
            Cell(min_pixels=784, max_pixels=784 * 12 * number, by_task=dict.fromkeys(IMAGE_TASKS, score))
            for number, score in enumerate(scores, start=1)
        ),
    )


SEEDS = tuple(
    SeedScores(seed=seed, parents=(_model("sft-256", (0.4, 0.5)),), merged=_model("merged", (merged, 0.6)))
    for seed, merged in ((1, 0.5), (2, 0.7))
)


def test_the_table_has_means_intervals_and_the_chosen_limits() -> None:
    rows = table(SEEDS)
    # 0.5 and 0.7: standard error 0.1, t quantile of one degree of freedom 12.706
    assert rows[1] == ["merged", *["60.0 +- 127.1"] * 7, "1-10, 1-10"]
    assert rows[0][0] == "sft-256"


def test_each_dot_of_the_plot_is_the_mean_of_a_cell_over_seeds() -> None:
    drawn = plots(SEEDS)["landscape"].figure.axes[0]
    dots = next(line for line in drawn.lines if line.get_gid() == "values-1")
    assert [round(value, 3) for value in dots.get_ydata()] == [0.6, 0.6]


def test_page_and_document_have_the_findings(tmp_path: Path) -> None:
    page = write_study(SEEDS, tmp_path, commit="0123abc", seconds=90)
    document = json.loads((tmp_path / "study.json").read_text())
    assert document["findings"][0].startswith("Table 6: over 2 seeds")
    assert "Table 6: over 2 seeds" in page.read_text()
    assert document["seeds"][1]["merged"]["cells"][0]["max_pixels"] == 784 * 12
    assert {path.name for path in tmp_path.glob("*.svg")} == {"landscape.svg", "landscape-document.svg"}
