# SPDX-License-Identifier: Apache-2.0
"""The example of the package README runs."""

import re
from pathlib import Path


def test_the_readme_example_runs() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
