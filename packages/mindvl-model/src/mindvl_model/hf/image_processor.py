# SPDX-License-Identifier: Apache-2.0
"""The settings of the image processor in a directory, found in the files of every version of transformers.

Used where a vision encoder is read, and for the image limits of recipes and conversions.
"""

from pathlib import Path

from mindvl_model.hf.config_keys import Keys
from mindvl_model.weights.json_file import read_json


def image_processor(path: Path) -> Keys | None:
    """The settings that transformers uses: a section of processor_config.json, or else preprocessor_config.json.

    Raises:
        WeightError: The file is damaged.
    """
    return section_or_file(path, "image_processor", "preprocessor_config.json")


def section_or_file(path: Path, section: str, name: str) -> Keys | None:
    """A section of processor_config.json, or else a file of its own; None if there is neither.

    Raises:
        WeightError: The file is damaged.
    """
    nested, alone = path / "processor_config.json", path / name
    if nested.is_file():
        keys = Keys(read_json(nested), str(nested))
        if keys.values.get(section) is not None:
            return keys.section(section)
    return Keys(read_json(alone), str(alone)) if alone.is_file() else None


def pixel_limits(path: Path) -> dict[str, int]:
    """min_pixels and max_pixels of the image processor; empty if it has none.

    Raises:
        WeightError: The file is damaged.
    """
    images = image_processor(path)
    if images is None:
        return {}
    size = images.values.get("size")
    size = size if isinstance(size, dict) else {}
    names = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    found: dict[str, int] = {}
    for name, edge in names:
        limit = images.values.get(name) or size.get(name) or size.get(edge)
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
            found[name] = limit
    return found if len(found) == len(names) else {}
