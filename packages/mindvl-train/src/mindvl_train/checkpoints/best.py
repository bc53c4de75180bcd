# SPDX-License-Identifier: Apache-2.0
"""The link `best` among the checkpoints of a run: it names the one with the lowest validation loss.

Comes after a save (saving.py) and before the first step of a resumed run. The manifest of the newest checkpoint has the
step of the best one, so a link that a killed process left behind is corrected when the run resumes.
"""

import os
from pathlib import Path

from mindvl_train.checkpoints.integrity import sync

BEST = "best"


def link_best(directory: Path, name: str | None) -> None:
    """Make the link name a checkpoint, atomically; it is removed if there is no such checkpoint."""
    link = directory / BEST
    if name is None or not (directory / name).is_dir():
        link.unlink(missing_ok=True)
        return
    if link.is_symlink() and os.readlink(link) == name:
        return
    new = directory / f"{BEST}.unfinished"
    new.unlink(missing_ok=True)
    new.symlink_to(name)  # relative, so that the run can be moved
    os.replace(new, link)
    sync(directory)
