# SPDX-License-Identifier: Apache-2.0
"""The page shows items evenly, in full, and escapes what comes from outside."""

from mindvl_cli.evaluation.benchmark import Item
from mindvl_cli.evaluation.page import even_choice, write_page
from mindvl_cli.evaluation.predict import Prediction


def test_items_are_taken_at_even_distances():
    assert even_choice(3, 10) == [0, 1, 2]
    assert even_choice(10, 4) == [0, 2, 5, 7]


def test_answers_cannot_write_html(tmp_path):
    item = Item(id="<i>", task="t", images=(), question="<b>?", answer="1")
    prediction = Prediction(item=item, answer="<script>", original=(), resized=())
    write_page(tmp_path / "page.html", name="a<b", predictions=[prediction] * 100, scores=[0.0] * 100)
    page = (tmp_path / "page.html").read_text()
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 60
    assert "60 of 100 items" in page
