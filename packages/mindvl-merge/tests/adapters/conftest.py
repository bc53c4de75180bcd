# SPDX-License-Identifier: Apache-2.0
"""A small model with linear layers and experts, and adapters that peft writes for it."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn


class _Experts(nn.Module):
    """Experts in two parameters, as transformers 5 stores them."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 6))  # [E, out, in]
        self.down_proj = nn.Parameter(torch.randn(3, 6, 4))

    def forward(self, x):
        return x


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(6, 6), nn.Linear(6, 2)
        self.mlp = nn.Module()
        self.mlp.experts = _Experts()


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([_Layer(), _Layer()])


@pytest.fixture
def make_base():
    """The base model; every call gives the same weights."""

    def make():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return _Model()

    return make


@pytest.fixture
def make_adapter(tmp_path, make_base):
    """Writes a PEFT directory with random matrices: `make_adapter(name, **LoraConfig arguments)`."""

    def make(name, **settings):
        with torch.random.fork_rng():
            torch.manual_seed(sum(map(ord, name)))
            model = get_peft_model(make_base(), LoraConfig(init_lora_weights=False, **settings))
            model.peft_config["default"].base_model_name_or_path = "base"
            model.save_pretrained(tmp_path / name)
        return tmp_path / name

    return make
