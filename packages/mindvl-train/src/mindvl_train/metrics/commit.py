# SPDX-License-Identifier: Apache-2.0
"""Which commit of mindvl a run was made with; stands in the run card and in the report of the demo."""

import subprocess
from pathlib import Path


def commit() -> str:
    """The commit of the checkout this code runs from; empty outside one, and where there is no git."""
    here = Path(__file__)
    try:
        # In somebody else's repository this file is not tracked, and that repository's commit is not ours.
        for command in (["git", "ls-files", "--error-unmatch", here.name], ["git", "rev-parse", "HEAD"]):
            done = subprocess.run(command, cwd=here.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
