# SPDX-License-Identifier: Apache-2.0
"""A process made ready: missing variables, cores, and nothing where nothing is wanted."""

import os
import threading
from pathlib import Path

import pytest

from mindvl_ops.runtime.start import Binding, Prepared, device_kind, prepare_process
from mindvl_ops.runtime.topology import Device, Topology, parse_cores

NPU_HOST = Topology(
    nodes={0: parse_cores("0-11"), 1: parse_cores("12-23")},
    devices=tuple(Device(index=i, kind="npu", bus_id="", near=parse_cores(c)) for i, c in enumerate(["12-23", "0-11"])),
    allowed=parse_cores("0-23"),
)


def test_an_npu_process_gets_variables_and_leaves_threads_to_torch_npu() -> None:
    environment = {"COMBINED_ENABLE": "0"}
    done = prepare_process(environment, "npu", local_rank=1, num_local_ranks=2, topology=NPU_HOST)
    assert environment["COMBINED_ENABLE"] == "0"
    assert environment["CPU_AFFINITY_CONF"] == "2,npu0:12-23,npu1:0-11"
    assert environment["TASK_QUEUE_ENABLE"] == "2"
    assert done.cores == parse_cores("0-11")
    again = prepare_process(environment, "npu", local_rank=1, num_local_ranks=2, topology=NPU_HOST)
    assert again == Prepared(variables={}, cores=frozenset())  # what is set is the user's word


def test_binding_can_be_turned_off() -> None:
    environment: dict[str, str] = {}
    done = prepare_process(environment, "npu", local_rank=0, num_local_ranks=2, binding="off", topology=NPU_HOST)
    assert "CPU_AFFINITY_CONF" not in environment
    assert done.cores == frozenset()


def test_a_cpu_process_is_bound_only_where_it_matters() -> None:
    core = min(os.sched_getaffinity(0))
    one_node = Topology(nodes={0: frozenset({core})}, devices=(), allowed=frozenset({core}))
    done: list[Prepared] = []

    def work(binding: Binding) -> None:
        done.append(prepare_process({}, "cpu", local_rank=0, num_local_ranks=1, binding=binding, topology=one_node))

    choices: list[Binding] = ["auto", "on"]
    for binding in choices:  # in a thread of its own, so that the test's process stays as it is
        thread = threading.Thread(target=work, args=(binding,))
        thread.start()
        thread.join()
    assert [result.cores for result in done] == [frozenset(), frozenset({core})]
    assert all(result.variables == {} for result in done)


@pytest.mark.parametrize(
    ("files", "kind"),
    [([], "cpu"), (["nvidia0", "nvidiactl"], "cuda"), (["davinci_manager"], "cpu"), (["davinci3", "nvidia0"], "npu")],
)
def test_the_kind_of_device_is_reported_by_its_files(tmp_path: Path, files: list[str], kind: str) -> None:
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    assert device_kind(tmp_path) == kind
