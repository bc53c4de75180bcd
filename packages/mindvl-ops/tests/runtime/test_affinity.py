# SPDX-License-Identifier: Apache-2.0
"""Cores of each process: beside its device, within the cpuset, shared evenly, never on a remote node."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mindvl_ops.runtime.affinity import CoreAssignment, assign_cores, bind_thread, cpu_affinity_conf, visible_devices
from mindvl_ops.runtime.topology import Device, Topology, format_cores, parse_cores, read_topology

KUNPENG = {0: "144-167", 1: "144-167", 2: "96-119", 3: "96-119", 4: "0-23", 5: "0-23", 6: "48-71", 7: "48-71"}


def kunpeng(allowed: str = "0-191") -> Topology:
    return Topology(
        nodes={node: parse_cores(f"{24 * node}-{24 * node + 23}") for node in range(8)},
        devices=tuple(
            Device(index=index, kind="npu", bus_id="", near=parse_cores(cores)) for index, cores in KUNPENG.items()
        ),
        allowed=parse_cores(allowed),
    )


def parts(plan: CoreAssignment) -> list[str]:
    return [format_cores(cores) for cores in plan.cores]


def test_eight_npus_of_a_kunpeng_share_their_own_nodes() -> None:
    plan = assign_cores(kunpeng(), range(8), kind="npu")
    assert parts(plan) == ["144-155", "156-167", "96-107", "108-119", "0-11", "12-23", "48-59", "60-71"]
    conf = cpu_affinity_conf(plan, range(8))
    assert conf is not None
    assert conf.startswith("2,npu0:144-155,npu1:156-167,npu2:96-107")


def test_two_sockets_with_hyper_threads_are_cut_evenly(make_host: Callable[..., Path]) -> None:
    root = make_host(nodes=["0-31,64-95", "32-63,96-127"], cuda=[0, 0, 0, 0, 1, 1, 1, 1])
    plan = assign_cores(read_topology(root, allowed=range(128)), range(8), kind="cuda")
    assert all(len(cores) == 16 for cores in plan.cores)
    assert frozenset().union(*plan.cores) == frozenset(range(128))
    assert plan.cores[0] <= parse_cores("0-31,64-95")


def test_a_cpuset_of_four_cores_is_never_left() -> None:
    plan = assign_cores(kunpeng(allowed="0-3"), range(8), kind="npu")
    assert parts(plan) == ["", "", "", "", "0-1", "2-3", "", ""]
    assert plan.why[0] == "npu 0: no core of its node (144-167) is free for this process"
    assert cpu_affinity_conf(plan, range(8)) is None  # torch_npu would silently skip all of it
    alone = assign_cores(kunpeng(allowed="0-3"), [4], kind="npu")
    assert cpu_affinity_conf(alone, [4]) == "1,npu4:0-3"  # too few cores for one to each thread


def test_a_device_of_unknown_place_is_not_bound() -> None:
    plan = assign_cores(kunpeng(), [9], kind="npu")
    assert parts(plan) == [""]
    assert "not known" in plan.why[0]


def test_ranks_without_devices_share_the_nodes_in_order() -> None:
    plan = assign_cores(kunpeng(allowed="0-7,24-31"), range(4), kind="cpu")
    assert parts(plan) == ["0-3", "4-7", "24-27", "28-31"]
    crowded = assign_cores(kunpeng(allowed="0-1"), range(4), kind="cpu")
    assert [len(cores) for cores in crowded.cores] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, [0, 1]),
        ({"ASCEND_RT_VISIBLE_DEVICES": "6,7"}, [6, 7]),
        ({"ASCEND_RT_VISIBLE_DEVICES": "6"}, [0, 1]),
        ({"ASCEND_RT_VISIBLE_DEVICES": "GPU-a,GPU-b"}, [0, 1]),
    ],
)
def test_visible_devices_give_the_physical_index(environment: dict[str, str], expected: list[int]) -> None:
    assert visible_devices(environment, "npu", 2) == expected


def test_threads_run_on_the_cores_they_are_bound_to() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    seen: list[set[int]] = []

    def work() -> None:
        bind_thread(one)
        child = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        child.start()
        child.join()

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert seen == [set(one)]
    assert os.sched_getaffinity(0) == before  # of the calling thread alone
    bind_thread([])
    assert os.sched_getaffinity(0) == before
