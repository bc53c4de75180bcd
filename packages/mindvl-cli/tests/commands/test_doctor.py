# SPDX-License-Identifier: Apache-2.0
"""Tests of the doctor: what it calls broken, what it only warns of."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindvl_cli.commands import doctor as module
from mindvl_cli.commands.doctor import Row, doctor

GIB = 1 << 30


def test_the_json_is_one_document_and_the_exit_code_follows_it() -> None:
    result = CliRunner().invoke(doctor, ["--json"])
    document = json.loads(result.stdout)

    assert result.exit_code == (0 if document["ok"] else 1)
    assert {"python", "cores", "memory", "disk", "torch", "megatron-core", "cuda", "npu"} <= {
        row["name"] for row in document["rows"]
    }


def test_every_row_that_is_not_well_says_what_to_change() -> None:
    document = json.loads(CliRunner().invoke(doctor, ["--json"]).stdout)

    assert all(row["advice"] for row in document["rows"] if row["status"] != "ok")


def test_something_broken_gives_exit_code_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "examine", lambda _: iter([Row(name="disk", status="fail", found="0", advice="Free.")]))

    assert CliRunner().invoke(doctor, ["--json"]).exit_code == 1
    assert "Free." in CliRunner().invoke(doctor, []).stdout


def test_a_warning_alone_gives_exit_code_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "examine", lambda _: iter([Row(name="cores", status="warn", found="1", advice="More.")])
    )

    assert CliRunner().invoke(doctor, []).exit_code == 0


def test_it_imports_no_torch() -> None:
    code = "import os, sys\nfrom mindvl_cli.commands.doctor import examine\nlist(examine(os.environ))\n"
    code += "print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert out.strip() == "False"


@pytest.mark.parametrize(
    ("row", "status"),
    [
        (module.check_python((3, 10, 9)), "fail"),
        (module.check_python((3, 11, 0)), "ok"),
        (module.check_python((3, 14, 0)), "warn"),
        (module.check_cores(1), "warn"),
        (module.check_memory(2 * GIB), "warn"),
        (module.check_disk(GIB // 4), "fail"),
        (module.check_disk(2 * GIB), "warn"),
        (module.check_disk(50 * GIB), "ok"),
        (module.check_shared_memory(64 << 20), "warn"),
        (module.check_version("torch", None), "fail"),
        (module.check_version("torch", "2.13.0+cpu"), "ok"),
        (module.check_version("torch", "2.9.1"), "warn"),
        (module.check_version("megatron-core", "0.19.2"), "fail"),
        (module.check_cuda(2, "2.13.0+cpu"), "warn"),
        (module.check_cuda(0, "2.13.0+cpu"), "ok"),
        (module.check_npu(0, "2.13.0", None, {}), "ok"),
        (module.check_npu(8, "2.13.0", None, {}), "fail"),
        (module.check_npu(8, "2.13.0", "2.12.0", {"ASCEND_HOME_PATH": "x"}), "fail"),
        (module.check_npu(8, "2.13.0+cpu", "2.13.0", {}), "fail"),
        (module.check_npu(8, "2.13.0+cpu", "2.13.0", {"ASCEND_HOME_PATH": "x"}), "ok"),
        (module.check_npu(8, "2.13.0", "2.13.0", {"ASCEND_HOME_PATH": "x"}, has_cuda_build=True), "fail"),
        (module.check_threads(None, 8), "ok"),
        (module.check_threads("8", 8), "ok"),
        (module.check_threads("16", 8), "warn"),
        (module.check_threads("1", 8), "warn"),
        (module.check_threads("many", 8), "warn"),
    ],
)
def test_each_check_knows_ok_from_warn_from_fail(row: Row, status: str) -> None:
    assert row.status == status
    assert bool(row.advice) == (status != "ok")


def test_a_host_with_npus_is_reported_its_variables_and_cores(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    node = tmp_path / "sys/devices/system/node/node0"
    node.mkdir(parents=True)
    (node / "cpulist").write_text(",".join(map(str, sorted(os.sched_getaffinity(0)))))
    for number in range(2):
        (tmp_path / f"dev/davinci{number}").touch()
        bus = tmp_path / f"sys/bus/pci/devices/0000:0{number}:00.0"
        bus.mkdir(parents=True)
        facts = {"vendor": "0x19e5", "device": "0xd802", "class": "0x120000", "numa_node": "0", "local_cpulist": ""}
        for name, text in facts.items():
            (bus / name).write_text(text)
    rows = {row.name: row for row in module.check_runtime({"TASK_QUEUE_ENABLE": "7"}, tmp_path)}
    assert rows["TASK_QUEUE_ENABLE"].status == "warn"
    assert rows["ACLNN_CACHE_LIMIT"].found == "not set"
    assert {"cores of npu 0", "cores of npu 1"} <= set(rows)
    assert list(module.check_runtime({}, tmp_path / "nothing")) == []


def test_an_untested_version_is_reported_with_what_is_expected_and_what_was_found() -> None:
    row = module.check_version("megatron-core", "0.19.0")
    assert row.advice == "Use megatron-core>=0.16.1,<0.16.2 instead of 0.19.0: others are known to break."
    assert "'megatron-core>=0.16.1,<0.16.2'" in module.check_version("megatron-core", None).advice


def test_every_package_asks_for_the_tested_ranges() -> None:
    asked: dict[str, set[str]] = {name: set() for name in module.REQUIRED}
    for path in sorted(Path(__file__).parents[3].glob("mindvl-*/pyproject.toml")):
        for requirement in tomllib.loads(path.read_text())["project"]["dependencies"]:
            name = re.split(r"[^A-Za-z0-9-]", requirement)[0]
            if name in asked:
                asked[name].add(requirement)
    assert asked == {name: {f"{name}>={first},<{end}"} for name, (first, end, _) in module.REQUIRED.items()}
