# SPDX-License-Identifier: Apache-2.0
"""Packs on their way to the device."""

from types import SimpleNamespace

import pytest
import torch

from mindvl_model import ModelError
from mindvl_model.testing.tiny import smallest_config
from mindvl_train.megatron.pipeline import _on_device

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
