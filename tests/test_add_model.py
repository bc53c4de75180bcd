# SPDX-License-Identifier: Apache-2.0
"""docs/guides/add-model.md shows lines that are in the sources, and a configuration with the parameters that it counts."""

import re
from dataclasses import replace
from pathlib import Path

DIFF = re.compile(r"^`([\w./-]+\.py)`:\n\n```diff\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_every_added_line_of_the_guide_is_in_its_file_in_this_order(root: Path) -> None:
    diffs = DIFF.findall((root / "docs" / "guides" / "add-model.md").read_text(encoding="utf-8"))
    assert [Path(file).name for file, _ in diffs] == ["mistral.py", "registry.py"]
    for file, diff in diffs:
        lines = iter((root / file).read_text(encoding="utf-8").splitlines())
        added = [line[1:] for line in diff.splitlines() if line.startswith("+") and "import deepseek_v3" not in line]
        assert added
        assert [line for line in added if line not in lines] == [], f"{file} has changed: update the guide"


def test_the_guide_counts_the_parameters_of_its_decoder(root: Path) -> None:
    text = (root / "docs" / "guides" / "add-model.md").read_text(encoding="utf-8")
    by_hand = 2 * 512 * 64 + 4 * (64 * 24 * (4 + 2 * 2) + 96 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    assert f"counts {by_hand:,} parameters" in text

    from mindvl_model import named_config
    from mindvl_model.counts import count_parameters
    from mindvl_model.families.mistral import MistralPreset

    found = re.findall(r"kind: mistral, (.*?)\}", text)[0]
    sizes = {name: int(value) for name, value in re.findall(r"(\w+): (\d+)", found)}
    decoder = MistralPreset(**sizes).decoder()  # type: ignore[arg-type]
    assert count_parameters(replace(named_config("tiny"), language=decoder)).language == by_hand
