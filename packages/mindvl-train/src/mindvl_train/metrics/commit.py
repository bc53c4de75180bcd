# SPDX-License-Identifier: Apache-2.0
"""The git commit of mindvl, for the run card and the report of the demo."""

import subprocess
from pathlib import Path


def commit() -> str:
    """The commit of the checkout that contains this file; empty outside a checkout or without git."""
    here = Path(__file__)
    try:
        # Inside another repository this file is not tracked.
        for command in (["git", "ls-files", "--error-unmatch", here.name], ["git", "rev-parse", "HEAD"]):
            done = subprocess.run(command, cwd=here.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
