# SPDX-License-Identifier: Apache-2.0
"""`mindvl bench` runs the scripts of the checkout; what they measure is what the document says."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mindvl_cli.commands import bench as module
from mindvl_cli.commands.bench import bench, benchmarks_directory
from mindvl_cli.failures import CliError

SCRIPT = """
import sys
sys.path.insert(0, {directory!r})
from figures import Figure, print_report
assert sys.argv[1:] == ["--json", "--quick"]
print_report([
    Figure(name="speed", value=30.0, unit="rows/s", rival="plain", rival_value=10.0, ratio_at_least=2.5),
    Figure(name="wait", value=7, unit="rows", at_most=5),
    Figure(name="size", value=1.5, unit="MB", rival="absent", ratio_at_least=2.0),
], as_json=True)
"""


@pytest.fixture
def small_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose `packing.py` reports three made-up figures by the real `figures.py`."""
    (tmp_path / "packing.py").write_text(SCRIPT.format(directory=str(benchmarks_directory("mindvl_data"))))
    monkeypatch.setattr(module, "benchmarks_directory", lambda package: tmp_path)
    return tmp_path


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmark of the operators as a module."""
    monkeypatch.syspath_prepend(str(benchmarks_directory("mindvl_ops")))
    yield importlib.import_module("ops")
    for name in ("ops", "figures"):
        sys.modules.pop(name, None)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The count of the step benchmark as a module."""
    monkeypatch.syspath_prepend(str(benchmarks_directory("mindvl_train")))
    yield importlib.import_module("layers")
    for name in ("layers", "figures"):
        sys.modules.pop(name, None)


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The packing benchmark as a module."""
    monkeypatch.syspath_prepend(str(benchmarks_directory("mindvl_data")))
    names = ("packing", "figures", "packers", "workloads")
    assert not set(names) & set(sys.modules)
    yield importlib.import_module("packing")
    for name in names:
        sys.modules.pop(name, None)


def test_every_name_is_a_script_of_the_checkout() -> None:
    assert all((benchmarks_directory(package) / f"{name}.py").is_file() for name, package in module.NAMES.items())


@pytest.mark.usefixtures("small_benchmark")
def test_the_json_holds_figures_ratios_and_the_machine() -> None:
    result = CliRunner().invoke(bench, ["packing", "--quick", "--json"], catch_exceptions=False)
    report = json.loads(result.stdout)

    assert report["benchmark"] == "packing"
    assert report["quick"] is True
    assert report["machine"]["cores"] >= 1
    assert [(f["ratio"], f["holds"]) for f in report["figures"]] == [(3.0, True), (None, False), (None, None)]


@pytest.mark.usefixtures("small_benchmark")
def test_the_table_names_target_rival_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    output = CliRunner().invoke(bench, ["packing", "--quick"], catch_exceptions=False).stdout

    lines = output.splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["speed", "30", "rows/s", ">=", "2.5", "x", "rival", "holds", "3.00", "x", "plain"],
        ["wait", "7", "rows", "<=", "5", "missed"],
        ["size", "1.5", "MB", ">=", "2", "x", "rival", "absent"],
    ]
    assert module.cpu_model() in lines[-1]


def test_only_step_runs_in_full(small_benchmark: Path) -> None:
    (small_benchmark / "step.py").write_text((small_benchmark / "packing.py").read_text().replace("--quick", "--full"))
    CliRunner().invoke(bench, ["step", "--full"], catch_exceptions=False)
    for options in (["packing", "--full"], ["step", "--full", "--quick"]):
        result = CliRunner().invoke(bench, options)
        assert result.exit_code == 2
        assert "--full: only `mindvl bench step` has it" in result.stderr


def test_outside_of_a_checkout_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "mindvl_data"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(package.parent)])
    monkeypatch.delitem(sys.modules, "mindvl_data", raising=False)

    with pytest.raises(
        CliError, match=r"site-packages.*: the installed mindvl-data does not include the benchmarks\. .* in a checkout"
    ):
        benchmarks_directory("mindvl_data")


def test_a_benchmark_that_fails_is_an_error_of_ours(small_benchmark: Path) -> None:
    (small_benchmark / "packing.py").write_text("raise SystemExit(3)")
    with pytest.raises(CliError, match=r"packing\.py: the benchmark failed with exit code 3\."):
        CliRunner().invoke(bench, ["packing"], catch_exceptions=False)


def test_waits_count_packs_closed_while_a_sample_waits(packing: ModuleType) -> None:
    # Samples 0-5; rows are closed after 2, 4, 6 and 6 samples were read. Sample 1 lies in the last of them.
    rows, read = [[0], [2, 3], [4], [1, 5]], np.array([2, 4, 6, 6])
    assert packing.longest_wait(rows, read) == 3  # the first three rows went by
    assert packing.longest_wait([[0], [1], [2]], np.array([1, 2, 3])) == 0


def test_drift_is_one_for_independent_packs_and_large_for_stretches(packing: ModuleType) -> None:
    generator = np.random.default_rng(0)
    independent = generator.integers(1, 20, 64 * 2000)
    assert packing.drift(independent) == pytest.approx(1.0, abs=0.1)
    assert packing.drift(np.sort(independent)) > 50
    assert packing.drift(np.array([1, 9] * 640)) == 0.0  # every window has the same mean


def test_imbalance_is_what_the_most_loaded_rank_has_above_the_mean(packing: ModuleType) -> None:
    loads = np.ones(4 * 8 * 8, np.int64)
    loads[::8] = 9  # the first rank gets 9 in every microbatch, the others 1: the mean is 2
    assert packing.imbalance(loads, balance=None)[:2] == pytest.approx((350.0, 350.0))
    diagonal = np.tile(1 + 8 * np.eye(8, dtype=np.int64).reshape(-1), 4)  # each rank once
    assert packing.imbalance(diagonal, balance=None)[:2] == pytest.approx((0.0, 350.0))
    once = np.ones(4 * 8 * 8, np.int64)
    once[0] = 65  # in one of four steps one rank has 72 where the mean is 16: 350 % above it
    assert packing.imbalance(once, balance=None) == pytest.approx((87.5, 87.5, 350.0, 350.0))


def test_rivals_lose_no_sample_and_overfill_no_pack(packing: ModuleType) -> None:
    lengths = np.random.default_rng(3).integers(1, 101, 500).tolist()
    for rival in packing.RIVALS.values():
        rows = [row for row, _ in rival(lengths, 100, 64)]
        assert sorted(number for row in rows for number in row) == list(range(500))
        assert max(sum(lengths[number] for number in row) for row in rows) <= 100


@pytest.mark.slow
def test_the_layers_that_are_counted_multiply_the_same_and_the_kernels_move_the_least(layers: ModuleType) -> None:
    by_layer = layers.counted()
    for counters in by_layer.values():
        flops = {name: counter.total("matmul").flops for name, counter in counters.items()}
        assert len(set(flops.values())) == 1, flops
        attention = {name: counter.total("attention").bytes for name, counter in counters.items()}
        assert len(set(attention.values())) == 1, attention
        moved = {name: counter.total("other").bytes for name, counter in counters.items()}
        assert min(moved, key=lambda name: moved[name]) == "mindvl on CUDA", moved
    # By hand, for Qwen3-8B at 8,192 tokens, in units of [T, H] bfloat16: forward norm 2, heads 3 + tables, sum and norm 4,
    # SwiGLU 9, sum 3; backward SwiGLU 15, norm and sum 4, heads 4.5 + tables, norm 3, sum 3. Gradients of weights are small.
    unit, tables = layers.TOKENS * 4096 * 2, 2 * layers.TOKENS * 128 * 4
    expected = (2 + 3 + 4 + 9 + 3 + 15 + 4 + 4.5 + 3 + 3) * unit + 2 * tables
    found = by_layer[layers.QWEN3_8B]["mindvl on CUDA"].total("other").bytes
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("figure", ["attention", "patches", "loss"])
def test_the_rivals_of_the_operators_compute_the_same(ops: ModuleType, figure: str) -> None:
    ways = {"attention": ("ours", "dense masked SDPA"), "patches": ("ours", "Conv3d"),
            "loss": ("plain", "by rows", "fused with the output layer")}[figure]  # fmt: skip
    results = []
    for way in ways:
        torch.manual_seed(0)
        results.append(ops.WAYS[figure](way, ops.SIZES[figure][0])())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-3, atol=1e-4)
