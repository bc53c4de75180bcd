# SPDX-License-Identifier: Apache-2.0
"""Adapters written as a PEFT directory give peft the same logits without mindvl."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from mindvl_model import WeightError
from mindvl_model.adapters.peft_export import write_peft_directory
from mindvl_model.hf.inputs import hf_inputs, pack_for
from mindvl_model.random_inputs import random_segment


@torch.no_grad()
def test_peft_on_the_published_base_gives_the_logits_of_the_adapted_model(
    adapted: Any, base_model: Any, tmp_path: Path, case: Any
) -> None:
    config, lora, parts = case
    model = adapted(config, lora, parts)
    segment = random_segment(config, [(1, 4, 6), (1, 8, 4)], num_text=20, seed=1)
    base, inputs = base_model(), hf_inputs(segment, config)
    logits = model.logits(**pack_for(base, [segment], config))
    before = base(**inputs).logits[0]
    expected = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(**inputs).logits[0]
    assert (logits - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert (before - expected).abs().max() > 1e-2


def test_an_existing_directory_is_not_overwritten(adapted: Any, tmp_path: Path, cases: Any) -> None:
    config, lora, parts = cases["some of Qwen2.5-VL"]
    adapted(config, lora, parts)
    with pytest.raises(WeightError, match="adapter: already exists"):
        write_peft_directory(tmp_path / "adapter", config, lora, parts, {}.__getitem__, base=None)
