# SPDX-License-Identifier: Apache-2.0
"""Check of the output path, before run.py reads or writes anything."""

from .adapters.peft_directory import CONFIG_NAME
from .config import MergeConfig
from .directory import INDEX_NAME, SINGLE_NAME
from .errors import MergeError
from .files import real_path
from .manifest import MANIFEST_NAME


def check_paths(config: MergeConfig) -> None:
    """Refuse an output path that would overwrite an input or anything but a model.

    Raises:
        MergeError: The output overlaps an input, or exists and may not be replaced.
    """
    out = real_path(config.out)
    for model in config.parents:
        source = real_path(model)
        if out == source or out in source.parents or source in out.parents:
            raise MergeError(f"{config.out}: the output overlaps the input {model}. Choose another directory.")
    if not out.exists():
        return
    if not out.is_dir():
        raise MergeError(f"{config.out}: the output is an existing file. Choose a directory.")
    if not config.overwrite:
        raise MergeError(
            f"{config.out}: the output exists. Remove it, choose another directory, or replace it with --force."
        )
    known = (MANIFEST_NAME, "config.json", CONFIG_NAME, INDEX_NAME, SINGLE_NAME)
    if any(out.iterdir()) and not any((out / name).exists() for name in known):
        raise MergeError(
            f"{config.out}: the directory is not a model, so --force does not replace it. Choose another output."
        )
