# SPDX-License-Identifier: Apache-2.0
"""The table of input formats: every module with a reader is listed under the name of its module; conversations have two names."""

from importlib import import_module
from pkgutil import iter_modules

from mindvl_data import formats
from mindvl_data.formats.registry import FORMATS


def test_every_module_that_has_a_reader_is_listed() -> None:
    names = [module.name for module in iter_modules(formats.__path__)]
    readers = [n for n in names if hasattr(import_module(f"mindvl_data.formats.{n}"), f"read_{n}")]
    assert list(FORMATS) == sorted([*readers, "llava", "messages"])
