# SPDX-License-Identifier: Apache-2.0
"""Launch variables: what is missing is named with its reason, what excludes each other is refused."""

import pytest

from mindvl_ops.runtime.env import VARIABLES, Variable, check_variables, missing_variables


def test_what_the_user_set_is_never_replaced() -> None:
    missing = missing_variables({"TASK_QUEUE_ENABLE": "1", "OMP_NUM_THREADS": "4"}, "npu", num_devices=8)
    assert "TASK_QUEUE_ENABLE" not in missing
    assert "OMP_NUM_THREADS" not in missing
    assert missing["ACLNN_CACHE_LIMIT"] == "100000"
    assert missing["HCCL_CONNECT_TIMEOUT"] == "1800"


def test_one_device_needs_no_settings_of_many() -> None:
    assert "HCCL_CONNECT_TIMEOUT" not in missing_variables({}, "npu", num_devices=1)
    assert missing_variables({}, "cuda", num_devices=1) == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert missing_variables({}, "cpu", num_devices=8) == {}


def test_memory_can_go_before_speed() -> None:
    assert missing_variables({}, "npu")["TASK_QUEUE_ENABLE"] == "2"
    assert missing_variables({}, "npu", memory_tight=True)["TASK_QUEUE_ENABLE"] == "1"


def test_blocking_launches_and_the_other_allocator_variable_take_settings_away() -> None:
    missing = missing_variables({"ASCEND_LAUNCH_BLOCKING": "1", "PYTORCH_ALLOC_CONF": "x"}, "npu")
    assert not {"TASK_QUEUE_ENABLE", "PYTORCH_NPU_ALLOC_CONF"} & set(missing)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_of_the_user_for_the_cuda_allocator_stay_alone(name: str) -> None:
    assert missing_variables({name: "max_split_size_mb:64"}, "cuda") == {}


def test_a_version_that_does_not_read_a_variable_is_not_asked_to() -> None:
    assert missing_variables({}, "npu", torch_npu=(1, 11)) == {}


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_every_value_is_one_that_its_reader_takes(variable: Variable) -> None:
    assert variable.accepts(variable.value)


@pytest.mark.parametrize(
    ("environment", "name", "words"),
    [
        ({"TASK_QUEUE_ENABLE": "3"}, "TASK_QUEUE_ENABLE", "one of 0, 1, 2"),
        ({"ACLNN_CACHE_LIMIT": "0"}, "ACLNN_CACHE_LIMIT", "1 to 10000000"),
        ({"ASCEND_LAUNCH_BLOCKING": "1"}, "ASCEND_LAUNCH_BLOCKING", "debugging"),
        ({"PYTORCH_NPU_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:1"}, "PYTORCH_ALLOC_CONF", "Keep one"),
        (
            {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"},
            "PYTORCH_NPU_ALLOC_CONF",
            "Take out max_split_size_mb",
        ),
        ({"TORCH_HCCL_ZERO_COPY": "1"}, "TORCH_HCCL_ZERO_COPY", "expandable_segments"),
        ({"HCCL_EXEC_TIMEOUT": "3000"}, "HCCL_EVENT_TIMEOUT", "more than HCCL_EXEC_TIMEOUT"),
        ({"HCCL_OP_EXPANSION_MODE": "AIV"}, "HCCL_OP_EXPANSION_MODE", "inference"),
    ],
)
def test_what_cannot_work_is_wrong_and_says_what_to_set(environment: dict[str, str], name: str, words: str) -> None:
    advice = [f.advice for f in check_variables(environment, "npu") if f.status == "wrong" and f.name == name]
    assert any(words in text for text in advice)


def test_a_whole_environment_has_nothing_to_say() -> None:
    environment = missing_variables({}, "npu", num_devices=8)
    assert check_variables(environment, "npu", num_devices=8) == []
    assert {finding.status for finding in check_variables({}, "npu", num_devices=8)} == {"missing"}
    (differs,) = check_variables(environment | {"TASK_QUEUE_ENABLE": "1"}, "npu", num_devices=8)
    assert (differs.name, differs.found, differs.status) == ("TASK_QUEUE_ENABLE", "1", "differs")
