# SPDX-License-Identifier: Apache-2.0
"""Packs on their way to the device, and what is left of a step."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindvl_model import ModelError, set_up_device
from mindvl_model.parallel_config import ParallelConfig
from mindvl_model.testing.tiny import smallest_config
from mindvl_ops.testing.fake_npu import FakeNpu
from mindvl_train.megatron import pipeline
from mindvl_train.megatron.pipeline import _divide_gradients, _on_device

CONFIG = smallest_config()


class _Pack:
    """A pack with one image of 6 visual tokens, and how often it was copied."""

    def __init__(self, num_placeholders: int) -> None:
        self.inputs = {
            "input_ids": torch.tensor([CONFIG.tokens.image] * num_placeholders),
            "image_grid_thw": torch.tensor([[1, 4, 6]]),
        }
        self.copies: list[str] = []

    def to(self, device: torch.device) -> "_Pack":
        self.copies.append(device.type)
        return self

    def model_inputs(self) -> dict[str, torch.Tensor]:
        return self.inputs


def test_a_pack_whose_placeholders_do_not_match_is_refused_before_it_reaches_the_device() -> None:
    first = SimpleNamespace(pre_process=True, mindvl=CONFIG)
    good, bad = _Pack(6), _Pack(5)
    packs = _on_device([good, bad], first, torch.device("meta"))  # type: ignore[list-item]
    assert next(packs) is good
    with pytest.raises(ModelError, match="5 image placeholders for 6 visual tokens"):
        next(packs)
    assert (good.copies, bad.copies) == (["meta"], [])


def test_later_stages_have_no_images_to_check() -> None:
    later = SimpleNamespace(pre_process=False, mindvl=CONFIG)
    (pack,) = _on_device([_Pack(0)], later, torch.device("meta"))  # type: ignore[list-item]
    assert pack.copies == ["meta"]


@pytest.fixture
def groups() -> Iterator[None]:
    from mindvl_train.parallel_state import process_groups

    with process_groups(set_up_device(), seed=0):
        yield


class _Chunk:
    """A model chunk with one gradient buffer, which keeps the activations it received."""

    def __init__(self) -> None:
        self.gradients = torch.tensor([6.0, -3.0, 0.5])
        self.received: torch.Tensor | None = None
        self.config = SimpleNamespace()
        self.parallel = ParallelConfig()

    def scale_gradients(self, factor: torch.Tensor) -> None:
        self.gradients *= factor

    def set_input_tensor(self, tensor: torch.Tensor | None) -> None:
        self.received = tensor


@pytest.mark.parametrize(("count", "expected"), [(3, [2.0, -1.0, 0.5 * (1 / torch.tensor(3))]), (0, [6.0, -3.0, 0.5])])
def test_gradients_are_divided_by_the_loss_tokens_without_a_host_wait(
    groups: None, fake_npu: FakeNpu, count: int, expected: list[float]
) -> None:
    chunks = [_Chunk(), _Chunk()]
    _divide_gradients(chunks, torch.tensor(count, dtype=torch.int))
    assert fake_npu.syncs == []
    for chunk in chunks:
        assert torch.equal(chunk.gradients, torch.tensor([float(value) for value in expected]))


def test_activations_of_the_previous_stage_are_released_after_a_step(
    groups: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = _Chunk()
    pack = SimpleNamespace(model_inputs=lambda: {"input_ids": torch.zeros(4)})

    def schedule(*, model: list[_Chunk], **_: Any) -> list[Any]:
        model[0].set_input_tensor(torch.ones(3))
        return []

    monkeypatch.setattr(pipeline, "get_forward_backward_func", lambda: schedule)
    pipeline.forward_backward([chunk], [pack], torch.device("cpu"))  # type: ignore[list-item]
    assert chunk.received is None
