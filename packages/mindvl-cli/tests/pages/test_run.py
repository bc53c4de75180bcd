# SPDX-License-Identifier: Apache-2.0
"""The page of a run: what it shows, that it fetches nothing, and that it does with little."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mindvl_cli.pages.run import run_page
from mindvl_cli.run_figures import SPLIT_PARTS, RunRecord, run_figures

CARD: dict[str, Any] = {
    "started_at": "2026-01-01T00:00:00+00:00",
    "start_step": 0,
    "phase": "warmup",
    "trained_parts": ["projector"],
    "frozen_parts": ["vision", "language"],
    "parameters": {
        "vision": 100, "projector": 20, "language": 300, "total": 420, "trained": 20, "language_for_one_token": 250,
    },
    "flops": {"formula": "2 * M * K * N"},
    "precision": "bf16",
    "layout": {"tp_size": 2, "recompute": {"kind": "none", "layers": None}},
    "schedule": {"steps": 40, "peak_lr": 0.001},
    "optimizer": {"beta1": 0.9},
    "seeds": {"weights": 7, "data": 8},
    "init": {"checkpoint": None, "vision": "models/<vit>"},
    "data": {
        "sources": [{"name": "pages & more", "share_asked": 1.0}],
        "seq_length": 128,
        "image": {"min_pixels": 3136, "max_pixels": 9999},
    },
    "hardware": {"device": "Ascend910B2", "count": 8, "platform": "Linux", "peak_tflops": 376, "peak_source": "table"},
    "versions": {"torch": "2.0"},
    "commit": "abc123",
}  # fmt: skip


def line(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 4.0 / step,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "loss_tokens": 10 * step,
        "tokens": 100 * step,
        "tokens_per_s": 50.0,
        "seconds_per_step": 2.0,
    }


def rich_line(step: int) -> dict[str, Any]:
    counts = {"packs": 2, "samples": 4, "sample_tokens": 200, "visual_tokens": 9, "tflop": 0.5}
    return line(step) | {
        "since_last": counts,
        "tokens_by_source": {"pages & more": 200},
        "loss_by_source": {"pages & more": 1.0},
        "loss_by_modality": {"text": 1.0, "image": 2.0},
        "grad_norm_by_part": {"projector": 1.0},
        "routers": {"load": {"3": 1.5, "4": 2.0}, "entropy": {"3": 1.0, "4": 1.1}},
        "mfu": 0.4,
        "tflops_per_device": 150.0,
        "imbalance": {"vision": 1.1, "language": 1.0},
        "step_split": dict.fromkeys(SPLIT_PARTS, 0.1),
    }


def page_of(lines: list[dict[str, Any]], card: dict[str, Any], skipped: tuple[dict[str, Any], ...] = ()) -> str:
    run = RunRecord(directory=Path("runs/try"), lines=tuple(lines), card=card, result={}, skipped=skipped)
    return run_page(run, run_figures(run))


class _Tags(HTMLParser):
    """Open tags, and what is fetched."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [
            str(value) for name, value in attrs if name in ("src", "href") and not str(value).startswith("#")
        ]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.mark.slow
def test_a_full_page_is_well_formed_fetches_nothing_and_shows_every_section() -> None:
    html = page_of([rich_line(step) for step in (1, 2, 3)], CARD, ({"step": 2, "why": "the loss is nan"},))
    tags = _Tags()
    tags.feed(html)
    assert tags.open == []
    assert tags.fetched == []
    assert "<script" not in html
    assert "http" not in re.sub(r"<style>.*?</style>", "", html, flags=re.S)
    titles = re.findall("<h2>(.*?)</h2>", html)
    assert titles == [
        "Loss", "Update", "Speed", "Step time", "Experts", "Data", "Skipped steps", "Run card",
    ]  # fmt: skip
    assert all(f">{name.replace('_', ' ')}</li>" in html for name in SPLIT_PARTS)
    for expected in (
        "376 TFLOP/s per device in bf16",
        "tp size 2",
        "weights 7",
        "2 * M * K * N",
        "abc123",
        "the loss is nan",
    ):
        assert expected in html
    assert "pages &amp; more" in html
    assert "models/&lt;vit&gt;" in html
    assert "pages & more" not in html


def test_a_run_of_an_older_version_with_one_report_has_a_page() -> None:
    html = page_of([line(1)], {})
    assert re.findall("<h2>(.*?)</h2>", html) == ["Loss", "Update", "Speed"]
    assert "Unfinished, step 1." in html


@pytest.mark.slow
def test_many_sources_are_in_the_table_but_the_largest_alone_in_the_chart() -> None:
    sources = {f"s{number:02d}": 1.0 + number for number in range(30)}
    tokens = {name: int(loss) for name, loss in sources.items()}
    html = page_of([rich_line(1) | {"loss_by_source": sources, "tokens_by_source": tokens}], CARD)
    assert all(html.count(f">{name}<") == (2 if int(name[1:]) >= 20 else 1) for name in sources)


def validation(step: int, loss: float | None, *, is_best: bool) -> dict[str, Any]:
    return {
        "step": step,
        "loss": loss,
        "token_accuracy": 0.5,
        "loss_by_source": {"pages & more": 3.0, "text": 2.0},
        "token_accuracy_by_source": {"pages & more": 0.25, "text": 0.75},
        "is_best": is_best,
        "generations": [{"name": "a<b", "prompt": "<script>?", "answer": "</td>x", "expected": None}] * (step == 20),
    }


def test_validations_are_points_with_a_star_and_answers_are_escaped() -> None:
    run = RunRecord(
        directory=Path("run"),
        lines=tuple(rich_line(step) for step in (10, 20, 30)),
        card=CARD,
        result={},
        skipped=(),
        validations=(
            validation(10, 3.0, is_best=True),
            validation(20, 2.5, is_best=True),
            validation(30, 2.75, is_best=False),
        ),
    )
    figures = run_figures(run)
    assert (figures["validation"]["best"]["step"], figures["validation"]["last"]["step"]) == (20, 30)
    assert "generations" not in figures["validation"]["best"]
    page = run_page(run, figures)
    assert "Validation loss; the star is the best step, 20" in page
    assert "&lt;script&gt;?" in page
    assert "&lt;/td&gt;x" in page
    assert "<script>" not in page
    assert "Answers at step 20" in page


def test_a_run_without_validation_has_no_section_for_it() -> None:
    run = RunRecord(directory=Path("run"), lines=(line(1),), card={}, result={}, skipped=())
    figures = run_figures(run)
    assert figures["validation"] is None
    assert "Validation" not in run_page(run, figures)
