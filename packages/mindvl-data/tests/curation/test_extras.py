# SPDX-License-Identifier: Apache-2.0
"""Tests of mindvl_data.curation.extras."""

import json

import pytest

from mindvl_data.curation import extras
from mindvl_data.errors import DataError


def test_an_installed_module_is_returned() -> None:
    assert extras.require("json", extra="curation") is json


def test_a_missing_module_is_reported_with_its_extra() -> None:
    with pytest.raises(DataError, match=r"^steps: x: no_such_module is not installed\. Install mindvl-data\[ocr\]\.$"):
        extras.require("no_such_module", extra="ocr", where="steps: x")


def test_missing_modules_of_an_extra_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.EXTRA_MODULES, "ocr", ("json", "no_such_module"))
    assert extras.missing_modules("ocr") == ["no_such_module"]
