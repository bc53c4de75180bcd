# SPDX-License-Identifier: Apache-2.0
"""`mindvl check memory`: its table and its exit code; the comparison itself is tested in mindvl-train."""

import json

import pytest
from click.testing import CliRunner

from mindvl_cli.commands.check import check
from mindvl_train.checks import memory
from mindvl_train.checks.memory import MemoryRow


@pytest.mark.parametrize(("rehearsed", "code"), [(100.5e6, 0), (98.5e6, 1)])
def test_the_exit_code_says_whether_every_peak_is_within_one_percent(rehearsed, code, monkeypatch):
    row = MemoryRow(name="Qwen3, one process", rank=0, measured=100e6, rehearsed=rehearsed, estimated=103e6)
    monkeypatch.setattr(memory, "compare_memory", lambda cases: iter([row]))
    done = CliRunner().invoke(check, ["memory", "--quick"])
    assert done.exit_code == code
    assert f"rehearsed {rehearsed / 1e6:9,.1f} MB ({rehearsed / 100e6 - 1:+.1%})" in done.output
    document = json.loads(CliRunner().invoke(check, ["memory", "--quick", "--json"]).output)
    assert document["ok"] is (code == 0)
    assert document["ranks"][0]["estimated"] == 103e6
