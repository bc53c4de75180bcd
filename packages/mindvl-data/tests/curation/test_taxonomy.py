# SPDX-License-Identifier: Apache-2.0
"""The default capabilities."""

from mindvl_data.curation.taxonomy import OTHER, TAXONOMY


def test_the_groups_of_the_paper_are_capabilities() -> None:
    # appendix C.2, and the categories of Table 11
    groups = {"video", "caption", "ocr", "gui", "math", "knowledge", "grounding", "general_vqa", "stem", "table_chart"}
    assert groups <= TAXONOMY.keys()
    assert OTHER not in TAXONOMY
