# SPDX-License-Identifier: Apache-2.0
"""Numbers of a table for a chart."""

from mindvl_data.curation.charts import chart_series


def test_numbers_are_read_with_separators_and_percent_signs() -> None:
    table = [["k", "a", "b"], ["x", "1,234.5", "10%"], ["y", "-2", "+.5"]]
    assert chart_series(table) == [[1234.5, -2.0], [10.0, 0.5]]


def test_tables_of_other_content_have_no_series() -> None:
    assert chart_series([["k", "a"], ["x", "1"]]) is None  # one category
    assert chart_series([["k", "a"], ["x", "1"], ["y", "n/a"]]) is None
    assert chart_series([["k", "a"], ["x", "1"], ["y"]]) is None
    assert chart_series([["k", "a"], ["", "1"], ["y", "2"]]) is None
