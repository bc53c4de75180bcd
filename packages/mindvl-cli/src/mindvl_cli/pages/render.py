# SPDX-License-Identifier: Apache-2.0
"""Render a page: one Jinja template, its values and the stylesheet as one HTML file that loads nothing.

Last step of every page. Everything that is put into a template is escaped, but for plots, which are our own SVG
(`Plot.__html__`), and the stylesheet.
"""

import base64
import functools
import io
from importlib.resources import files
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image


def render(template: str, **values: Any) -> str:
    """The page of `templates/TEMPLATE.html.j2`; a value that the template misses is an error."""
    return _environment().get_template(f"{template}.html.j2").render(values)


def data_url(image: Image.Image | NDArray[np.uint8], kind: str = "PNG") -> str:
    """An image as a URL that contains it.

    Args:
        kind: PNG or JPEG.
    """
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, kind, quality=90)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def words(name: str) -> str:
    """The words of a name with underscores."""
    return name.replace("_", " ")


def share_text(share: float | None) -> str:
    """Such as 12.34%; a dash where there is none."""
    return "-" if share is None else f"{share:.2%}"


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mindvl_cli.pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"fmt": _formatted, "compact": _compact, "words": words, "pairs": _pairs}
    environment.globals["style"] = Markup(files("mindvl_cli.pages").joinpath("style.css").read_text(encoding="utf-8"))
    return environment


def _formatted(value: Any, spec: str = ",") -> str:
    """A number by a format specification; a dash where there is none."""
    return "-" if value is None else format(value, spec)


def _compact(count: float) -> str:
    """Three digits and the unit of a large count."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _pairs(values: dict[str, Any]) -> str:
    """name value, name value; values that are not set are left out."""
    pieces = []
    for name, value in values.items():
        if isinstance(value, dict):
            value = f"({_pairs(value)})"
        if value is not None and value != "()":
            pieces.append(f"{words(name)} {value}")
    return ", ".join(pieces)
