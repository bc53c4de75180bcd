# SPDX-License-Identifier: Apache-2.0
"""Fonts for rendered text: which characters a font file has, and which font can show a text.

Used by rendering.py. DejaVu of matplotlib shows Latin, Greek and Cyrillic; for Chinese the user names a font file.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from mindvl_data.curation.extras import require
from mindvl_data.curation.step import Context
from mindvl_data.errors import DataError

_DEJAVU = ("DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf", "DejaVuSans-Bold.ttf")


def font_files(named: Sequence[str | Path]) -> list[str]:
    """The named font files, or those of DejaVu in an installed matplotlib.

    Raises:
        DataError: A file does not exist, or none is named and matplotlib is not installed.
    """
    if named:
        for name in named:
            if not Path(name).is_file():
                raise DataError(f"steps: fonts: the file {name} does not exist. Correct the path.")
        return [str(name) for name in named]
    found = importlib.util.find_spec("matplotlib")
    if found is None or not found.submodule_search_locations:
        raise DataError("steps: fonts: no font is named and matplotlib is not installed. Name a font file in fonts.")
    directory = Path(found.submodule_search_locations[0]) / "mpl-data" / "fonts" / "ttf"
    return [str(directory / name) for name in _DEJAVU]


def characters_of(path: str, context: Context) -> frozenset[int]:
    """Code points for which a font has a glyph.

    Raises:
        DataError: The file is not a font.
    """

    def read() -> frozenset[int]:
        library = require("fontTools.ttLib", extra="curation", where="steps: fonts")
        try:
            with library.TTFont(path, fontNumber=0, lazy=True) as font:
                return frozenset(font.getBestCmap() or ())
        except (library.TTLibError, OSError, AssertionError) as error:
            raise DataError(
                f"steps: fonts: {path} is not a font ({error}). Name a TrueType or OpenType file."
            ) from error

    return context.resource(("font characters", path), read)


def missing_characters(text: str, path: str, context: Context) -> str:
    """Characters of a text that a font cannot show, each once, sorted."""
    known = characters_of(path, context)
    return "".join(sorted({one for one in text if not one.isspace() and ord(one) not in known}))


def usable_fonts(text: str, fonts: Sequence[str], context: Context) -> tuple[list[str], str]:
    """The fonts that can show a whole text; if there are none, what the best one is missing."""
    missing = {path: missing_characters(text, path, context) for path in fonts}
    usable = [path for path in fonts if not missing[path]]
    return usable, "" if usable else min(missing.values(), key=len)
