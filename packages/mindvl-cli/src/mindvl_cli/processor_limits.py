# SPDX-License-Identifier: Apache-2.0
"""Write image size limits into the processor of a model directory, or of a copy of it.

Last step of `mindvl search-resolution` and of the demo.
"""

import json
import shutil
from pathlib import Path

from mindvl_cli.failures import CliError
from mindvl_cli.whole_file import write_whole


def apply_limits(directory: Path, *, min_pixels: int, max_pixels: int, out: Path | None = None) -> Path:
    """Write limits into the processor of a model directory, or of a copy of it.

    Args:
        out: New directory for the copy; None changes `directory` itself.

    Returns:
        The changed processor file.
    """
    if out is not None:
        return _limited_copy(directory, out, min_pixels=min_pixels, max_pixels=max_pixels)
    for name in ("processor_config.json", "preprocessor_config.json"):
        path = directory / name
        if not path.is_file():
            continue
        document = json.loads(path.read_text(encoding="utf-8"))
        holder = document.get("image_processor") if name == "processor_config.json" else document
        if isinstance(holder, dict) and holder.keys() & {"size", "min_pixels", "max_pixels"}:
            holder["size"] = {"longest_edge": max_pixels, "shortest_edge": min_pixels}
            for old_name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels)):
                if old_name in holder:
                    holder[old_name] = value
            write_whole(path, json.dumps(document, indent=2, sort_keys=True) + "\n")
            return path
    raise CliError(f"{directory}: has no image processor with a size. Export the model with its processor.")


def _limited_copy(directory: Path, out: Path, *, min_pixels: int, max_pixels: int) -> Path:
    """Write a copy with these limits atomically."""
    if out.exists():
        raise CliError(f"--copy-to: directory {out} exists. Remove it or choose another directory.")
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        shutil.copytree(directory, unfinished)
        changed = apply_limits(unfinished, min_pixels=min_pixels, max_pixels=max_pixels)
        unfinished.rename(out)
    except OSError as error:  # copytree's own error is one, with a list of files
        what = error.strerror or str(error)[:300]
        raise CliError(f"{out}: cannot be written ({what}). Free space or choose another directory.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return out / changed.name
