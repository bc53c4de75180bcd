# SPDX-License-Identifier: Apache-2.0
"""Tests of the routing page: figures appear, sources are escaped, every group has its curve."""

import numpy as np

from mindvl_cli.pages.routing import routing_page
from mindvl_model.routing import RoutingAnalysis


def test_the_page_shows_every_group_and_escapes_what_users_named() -> None:
    analysis = RoutingAnalysis(num_experts=4, experts_per_token=1, layers=(0, 1), segment_lengths=(2,))
    experts = np.array([[0], [1], [0], [1], [0]])
    visual = np.array([True, True, True, False, False])
    analysis.add_pack({0: experts, 1: experts}, [("<photos>", 5)], visual)
    figures = {
        "model": "a&b",
        "data": "d",
        "packs": 1,
        "tokens": 5,
        "layers": [0, 1],
        "experts": 4,
        "experts_per_token": 1,
    }
    text = routing_page(figures, analysis.scores((1.0, 2.0)))
    assert "<photos>" not in text
    assert "&lt;photos&gt;" in text
    assert "a&amp;b" in text
    for modality in ("all", "visual", "text", "mixed"):
        assert f"SCH, {modality} tokens, windows of 2" in text
    assert "100.0%" in text  # two experts serve every window of two tokens
    assert "http" not in text
