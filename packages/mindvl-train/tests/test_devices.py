# SPDX-License-Identifier: Apache-2.0
"""Peaks of devices are found under the names that drivers and users give them."""

import pytest
import torch

from mindvl_train.devices import DEVICES, find_device, name_of


@pytest.mark.parametrize(
    ("reported", "tflops"),
    [
        ("Ascend910B1", 400),
        ("910b2", 376),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H800", 989),
        ("NVIDIA H20", 148),
        ("H200", 989),
    ],
)
def test_a_device_is_found_as_its_driver_names_it(reported: str, tflops: float) -> None:
    device = find_device(reported)
    assert device is not None
    assert device.bf16_tflops == tflops


@pytest.mark.parametrize("unknown", ["cpu", "", "Ascend910B2C", "Ascend910B4", "NVIDIA T4", "H2000"])
def test_a_device_that_is_not_in_the_table_is_not_taken_for_another(unknown: str) -> None:
    assert find_device(unknown) is None


def test_every_name_of_the_table_finds_itself_and_the_h200_has_the_memory_of_its_own() -> None:
    assert [find_device(device.name) for device in DEVICES] == list(DEVICES)
    h200 = find_device("NVIDIA H200")
    assert h200 is not None
    assert h200.memory_gb == 141


def test_all_devices_but_npus_have_a_cuda_compute_capability() -> None:
    assert {device.name for device in DEVICES if device.capability is None} == {"910B1", "910B2"}


def test_the_cpu_has_a_name_but_no_peak() -> None:
    assert name_of(torch.device("cpu")) == "cpu"
