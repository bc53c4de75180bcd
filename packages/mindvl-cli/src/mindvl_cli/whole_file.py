# SPDX-License-Identifier: Apache-2.0
"""Write a file atomically: reports, pages, recipes.

A full disk or a killed process leaves the previous file unchanged.
"""

import os
from pathlib import Path

from mindvl_cli.failures import CliError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write to a temporary name, flush to disk, rename; missing directories are created.

    Args:
        content: Bytes, or text that is written as UTF-8 with unchanged line ends.

    Raises:
        CliError: It cannot be written; a previous file is unchanged.
    """
    target = path.resolve()  # keep a symbolic link
    unfinished = target.with_name(f"{target.name}.unfinished")
    data = content.encode() if isinstance(content, str) else content
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():  # /dev/stdout: a rename would replace the device
            target.write_bytes(data)
            return
        try:
            with unfinished.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, target)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CliError(
            f"{path}: cannot be written ({error.strerror or error}). Free space or choose another path, and "
            "start the same command again; a previous file is unchanged."
        ) from error
