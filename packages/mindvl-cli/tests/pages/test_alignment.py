# SPDX-License-Identifier: Apache-2.0
"""The figure of two loss curves: well-formed, both curves inside, the wide one at the plain losses."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from mindvl_cli.pages.alignment import alignment_svg
from mindvl_train.checks.alignment import AlignedStep, AlignmentReport

SVG = "{http://www.w3.org/2000/svg}"


def _report(differences: list[float]) -> AlignmentReport:
    steps = tuple(
        AlignedStep(
            step=number + 1,
            loss=(3.0 - number / 10) * (1 + difference),
            plain_loss=3.0 - number / 10,
            grad_norm=1.0,
            plain_grad_norm=1.0,
        )
        for number, difference in enumerate(differences)
    )
    return AlignmentReport(
        phase="sft", precision="fp32", steps=steps, parameter_difference=0.0, parameter="a.weight", moved_tokens=0
    )


def _places(figure: ElementTree.Element, name: str) -> list[tuple[float, ...]]:
    path = figure.find(f".//{SVG}g[@id='{name}']/{SVG}path")
    assert path is not None
    return [tuple(map(float, place.split())) for place in re.split("[ML]", path.attrib["d"])[1:]]


def test_the_figure_is_well_formed_and_keeps_every_point_inside() -> None:
    figure = ElementTree.fromstring(alignment_svg(_report([1e-7, 2e-6, 0.0, 4e-5])))
    width, height = map(float, figure.attrib["viewBox"].split()[2:])
    for name in ("plain", "ours", "difference"):
        places = _places(figure, name)
        assert len(places) == 4
        assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    assert "mean 1.1e-05" in "".join(figure.itertext())


@pytest.mark.slow
def test_curves_that_part_are_drawn_apart() -> None:
    figure = ElementTree.fromstring(alignment_svg(_report([0.0, 0.1, 0.2, 0.3])))
    assert _places(figure, "ours") != _places(figure, "plain")


def test_two_equal_losses_do_not_divide_by_zero() -> None:
    report = _report([0.0, 0.0])
    flat = replace(report, precision="bf16", steps=(report.steps[0], report.steps[0]))
    ElementTree.fromstring(alignment_svg(flat))
