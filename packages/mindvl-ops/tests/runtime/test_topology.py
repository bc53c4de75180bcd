# SPDX-License-Identifier: Apache-2.0
"""Topology from recorded hosts: a 192-core Kunpeng with eight NPUs, a two-socket x86 with eight GPUs."""

from collections.abc import Callable
from pathlib import Path

from mindvl_ops.runtime.topology import format_cores, parse_cores, parse_npu_smi_topology, read_topology

MakeHost = Callable[..., Path]

# The form of `npu-smi info -t topo` on a host of eight NPUs, with the cores that the contracts page records.
NPU_SMI = """\
           NPU0  NPU1  NPU2  NPU3  NPU4  NPU5  NPU6  NPU7       CPU Affinity
NPU0       HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS       144-167
NPU1       HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS       144-167
NPU2       HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS       96-119
NPU3       HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS       96-119
NPU4       HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS       0-23
NPU5       HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS       0-23
NPU6       HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS       48-71
NPU7       HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS  HCCS       48-71

Legend:

  X    = Self
  SYS  = Path traversing PCIe and NUMA nodes. Nodes are connected through SMP, such as QPI, UPI.
"""


def test_lists_of_cores_are_read_and_written() -> None:
    assert parse_cores("0-2,5,8-9\n") == {0, 1, 2, 5, 8, 9}
    assert parse_cores("") == frozenset()
    assert format_cores([9, 8, 5, 0, 1, 2]) == "0-2,5,8-9"
    assert format_cores([]) == ""


def test_the_matrix_of_npu_smi_names_the_cores_of_each_npu() -> None:
    found = parse_npu_smi_topology(NPU_SMI)
    assert sorted(found) == list(range(8))
    assert found[0] == found[1] == frozenset(range(144, 168))
    assert found[7] == frozenset(range(48, 72))
    assert parse_npu_smi_topology("no devices\n") == {}


def test_gpus_are_found_on_the_bus_with_the_cores_of_their_node(make_host: MakeHost) -> None:
    root = make_host(nodes=["0-31,64-95", "32-63,96-127"], cuda=[0, 0, 0, 0, 1, 1, 1, 1])
    topology = read_topology(root, allowed=range(128))
    assert [device.index for device in topology.devices] == list(range(8))
    assert {device.kind for device in topology.devices} == {"cuda"}
    assert topology.devices[0].near == parse_cores("0-31,64-95")
    assert topology.devices[7].near == parse_cores("32-63,96-127")


def test_a_node_that_the_firmware_does_not_know_is_asked_of_npu_smi(make_host: MakeHost) -> None:
    root = make_host(nodes=[f"{24 * n}-{24 * n + 23}" for n in range(8)], npu=[-1] * 8)
    silent = read_topology(root, allowed=range(192))
    assert all(not device.near for device in silent.devices)
    reported = read_topology(root, allowed=range(192), npu_smi=NPU_SMI)
    assert reported.devices[0].near == frozenset(range(144, 168))
    assert reported.devices[0].bus_id == silent.devices[0].bus_id


def test_other_devices_of_the_bus_are_left_out(make_host: MakeHost) -> None:
    root = make_host(nodes=["0-3"], other=[0, 0])
    assert read_topology(root, allowed=range(4)).devices == ()


def test_this_host_has_cores() -> None:
    assert read_topology().allowed
