# SPDX-License-Identifier: Apache-2.0
"""Model directories on the command line: a directory, or the id of a model in the cache of huggingface_hub.

Used by the commands that read a model. Nothing is downloaded: a model that is not in the cache is refused with the command
that downloads it.
"""

import re
from pathlib import Path
from typing import Any

import click

HUB_PREFIX = "hf://"
_ID = re.compile(r"(?:hf://)?([\w.-]+/[\w.-]+)(?:@([\w.-]+))?")


class ModelDirectory(click.ParamType):
    """A directory, or `ORG/NAME[@REVISION]` of a model that was downloaded; the value is the Path of a directory.

    Args:
        kinds: The directories that the command accepts, for messages.
    """

    name = "directory"

    def __init__(self, kinds: str = "a model directory") -> None:
        self.kinds = kinds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Find the directory."""
        path = Path(value)
        if path.is_dir():
            return path
        if path.exists():
            self.fail(f"{value} is a file. Name {self.kinds}.", param, ctx)
        found = cached_model(str(value))
        if found is not None:
            return found
        if _ID.fullmatch(str(value)) is None:
            self.fail(f"directory {value} does not exist. Name {self.kinds}, or the id of a model.", param, ctx)
        self.fail(
            f"{value} is neither a directory nor a model in the cache of huggingface_hub. Correct the path. "
            f"{download_command(str(value))}",
            param,
            ctx,
        )


MODEL_DIRECTORY = ModelDirectory()


def download_command(text: str) -> str:
    """What to do about a model id that is not in the cache."""
    found = _ID.fullmatch(text)
    if found is None:
        return "Write hf://ORG/NAME or hf://ORG/NAME@REVISION."
    return f"Download the model: hf download {found[1]}{f' --revision {found[2]}' if found[2] else ''}"


def cached_model(text: str) -> Path | None:
    """The snapshot of a model id in the cache of huggingface_hub; None if it is not there or `text` is no id."""
    found = _ID.fullmatch(text)
    if found is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(found[1], "config.json", revision=found[2])
    return Path(config).parent if isinstance(config, str) else None
