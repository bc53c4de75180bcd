# SPDX-License-Identifier: Apache-2.0
"""What the tests of the whole workspace share: its files, as a clone would hold them."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def workspace_files() -> list[Path]:
    """Every file that is tracked or about to be, relative to the root; what git ignores is left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = sorted({Path(name) for name in listed.split("\0") if name})
    return [path for path in files if (ROOT / path).is_file()]


@pytest.fixture(scope="session")
def root() -> Path:
    """The directory of the workspace."""
    return ROOT
