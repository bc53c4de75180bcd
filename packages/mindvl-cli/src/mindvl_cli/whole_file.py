# SPDX-License-Identifier: Apache-2.0
"""Write a file whole or not at all: reports, pages, recipes.

Comes after whatever makes the content. A full disk or a kill leaves the former file as it was.
"""

import os
from pathlib import Path

from mindvl_cli.failures import CliError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write under another name, flush to disk, rename; missing directories are made.

    Args:
        content: Text is written as UTF-8, with its line ends as they are.

    Raises:
        CliError: It cannot be written; nothing of it is left, and a former file is unchanged.
    """
    target = path.resolve()  # a link stays a link
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
            f"{path}: cannot be written ({error.strerror or error}). Make room or choose another place, and start the "
            "same command again; a former file there is unchanged."
        ) from error
