# SPDX-License-Identifier: Apache-2.0
"""The layout search with adapters: an 8B model on one card of 24 GB, and parameters, gradients and states by hand."""

import pytest

from mindvl_model import named_config
from mindvl_model.adapters import LoRAConfig
from mindvl_model.adapters.sizes import adapter_parameters
from mindvl_model.counts import count_parameters
from mindvl_model.parallel_config import ParallelConfig, RecomputeConfig
from mindvl_train.devices import find_device
from mindvl_train.layout_search import Machine, Request, evaluate, search

MODEL = named_config("mindvl-8b")


def request(lora: LoRAConfig | None) -> Request:
    device = find_device("rtx-4090")
    assert device is not None
    machine = Machine(device=device, num_devices=1, per_server=1)
    return Request(
        model=MODEL, machine=machine, seq_length=2048, max_pixels=512 * 28 * 28, global_batch_size=16, lora=lora
    )


def test_adapters_of_an_8b_model_fit_on_one_card_of_24_gb_and_full_training_does_not() -> None:
    assert not search(request(None).task()).candidates
    lora = LoRAConfig(rank=16)
    (best, *_) = search(request(lora).task()).candidates
    (memory,) = best.memory
    trained = sum(adapter_parameters(MODEL, lora).values())
    assert trained == pytest.approx(51e6, rel=0.1)
    assert memory.parameters == 2 * (count_parameters(MODEL).total + trained)
    assert memory.gradients == 4 * trained
    assert memory.optimizer == (4 if best.offload else 12) * trained
    assert memory.total < 0.94 * 25.7e9


def test_quantized_weights_need_half_a_byte_and_their_scales() -> None:
    memory = {}
    for bits in (16, 8, 4):
        lora = LoRAConfig(rank=16, base_bits=bits)  # type: ignore[arg-type]
        (best, *_) = search(request(lora).task()).candidates
        (memory[bits],) = best.memory
    decoder = 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288)
    vision = 32 * (1280 * 3840 + 1280 * 1280 + 3 * 1280 * 3456) + 5120 * 5120 + 5120 * 4096
    scales = (1 + 4 / 256) / 64  # one byte for 64 weights, four for 256 of these bytes
    for bits in (8, 4):
        saved = (2 - bits / 8 - scales) * (decoder + vision)
        assert memory[bits].parameters == pytest.approx(memory[16].parameters - saved, rel=1e-6)
    assert 6e9 < memory[4].parameters < 7e9  # of which 2.5e9 are embedding and output layer


def test_a_step_with_adapters_is_faster_than_one_that_computes_gradients_of_weights() -> None:
    machine = Machine(device=find_device("h200"), num_devices=8)  # type: ignore[arg-type]
    times = []
    for lora in (None, LoRAConfig(rank=16)):
        task = Request(model=MODEL, machine=machine, global_batch_size=64, lora=lora).task()
        (best, *_) = search(task).candidates
        times.append(best.time.matmul)
    assert 0.5 < times[1] / times[0] < 0.8  # forward and one of two backward products


def test_peaks_with_dropout_are_those_of_a_rehearsal() -> None:
    """recipes/mindvl-8b/sft.yaml with adapters on 16 910B2: 21.61 and 16.44 GB of tensors by `mindvl rehearse`."""
    device = find_device("910b2")
    assert device is not None
    task = Request(
        model=MODEL,
        machine=Machine(device=device, num_devices=16),
        max_pixels=4096 * 28 * 28,
        max_patches=16384,
        global_batch_size=32,
        lora=LoRAConfig(rank=16, dropout=0.05),
    ).task()
    parallel = ParallelConfig(pp_size=2, virtual_stages=4, stage_layers=(4, 6, 4, 5, 4, 5, 3, 5))
    found = evaluate(task, parallel, RecomputeConfig(kind="full")).memory
    assert [memory.total - memory.base for memory in found] == [
        pytest.approx(21.61e9, rel=0.03),
        pytest.approx(16.44e9, rel=0.03),
    ]
