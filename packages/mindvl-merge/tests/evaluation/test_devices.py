# SPDX-License-Identifier: Apache-2.0
"""Processes answer all batches, their errors reach the caller, and a process that ends is named."""

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.devices import DevicePool, check_device


class Answers:
    """Answers with its device; batches are texts."""

    def __init__(self, device, num_processes):
        if device == "broken":
            raise EvaluationError("model: cannot be loaded.")
        self.name = f"{device} of {num_processes}"

    def prepare(self, batch):
        return f"{batch} prepared"

    def generate(self, inputs):
        if inputs.startswith("error"):
            raise ValueError("bad batch")
        if inputs.startswith("end"):
            os._exit(7)
        return [f"{inputs} by {self.name}"], 0.5


@pytest.fixture(scope="module")
def make():
    """The class above under a name that another process can import."""
    sys.path.insert(0, str(Path(__file__).parent))
    yield import_module(Path(__file__).stem).Answers
    sys.path.pop(0)


@pytest.fixture(scope="module")
def pool(make):
    pool = DevicePool(make, ["a", "b"])
    yield pool
    pool.close()


def test_every_batch_is_answered_once_and_both_processes_work(pool):
    for _ in range(2):  # the processes stay for the next call
        found = list(pool.answer([f"batch {number}" for number in range(9)]))
        assert sorted(number for number, _, _ in found) == list(range(9))
        assert {seconds for _, _, seconds in found} == {0.5}
        for number, (answer,), _ in found:
            assert answer in {f"batch {number} prepared by {device} of 2" for device in "ab"}
        assert {answer[0][-6:] for _, answer, _ in found} == {"a of 2", "b of 2"}


@pytest.mark.slow
def test_an_error_in_a_process_is_raised_and_the_pool_can_be_used_again(pool):
    with pytest.raises(ValueError, match="bad batch"):
        list(pool.answer(["one", "error", "two"]))
    assert len(list(pool.answer(["one", "two"]))) == 2


@pytest.mark.slow
def test_a_process_that_ends_is_named_with_its_exit_code(pool):
    with pytest.raises(EvaluationError, match=r"the process of [ab] ended with exit code 7\. .* run the command again"):
        list(pool.answer(["end"]))


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_the_error_of_the_caller(make):
    with pytest.raises(EvaluationError, match="model: cannot be loaded"):
        list(DevicePool(make, ["broken"]).answer(["x"]))


def test_a_device_that_this_machine_does_not_have_is_refused(monkeypatch):
    check_device("cpu")
    for accelerator, name in ((None, "cuda:0"), (torch.device("cuda"), "cuda:2"), (torch.device("cuda"), "npu")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available, found=accelerator: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        with pytest.raises(EvaluationError, match=f"--device: '{name}' is not a device of this machine"):
            check_device(name)
    check_device("cuda:1")
