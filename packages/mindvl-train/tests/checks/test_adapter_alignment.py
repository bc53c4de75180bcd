# SPDX-License-Identifier: Apache-2.0
"""A run that trains adapters equals PEFT in a plain transformers loop step for step; what cannot be compared is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindvl_model import MindVLConfig
from mindvl_model.adapters import LoRAConfig
from mindvl_model.testing.tiny import smallest_qwen2_5_vl, smallest_qwen3_moe
from mindvl_train import ModelSection, RunConfig, TrainError
from mindvl_train.checks import adapter_alignment
from mindvl_train.checks.adapter_alignment import check_adapter
from mindvl_train.checks.alignment import check_alignment

LORA = LoRAConfig(rank=4, alpha=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "lora"),
    [
        (smallest_qwen2_5_vl(vocab_size=264), LORA),
        (None, LORA),
        (None, replace(LORA, dora=True)),
        (smallest_qwen3_moe(vocab_size=264, aux_loss_weight=0.0), LORA),
        (smallest_qwen3_moe(vocab_size=264, aux_loss_weight=0.0), replace(LORA, targets=("up_proj", "o_proj"))),
    ],
    ids=["Qwen2.5-VL", "Qwen3", "DoRA", "Qwen3-MoE", "up_proj of Qwen3-MoE"],
)
def test_adapters_train_as_in_peft(
    make_config: Callable[..., RunConfig], tmp_path: Path, model: MindVLConfig | None, lora: LoRAConfig
) -> None:
    changes: dict[str, Any] = {}
    if model is not None:
        changes["model"] = ModelSection(vision=model.vision, language=model.language)
    config = make_config(steps=6, adapter=lora, **changes)
    report = check_alignment(config, tmp_path / "both")
    assert report.holds, report
    assert max(step.difference for step in report.steps) < 1e-5
    assert report.steps[-1].loss != pytest.approx(report.steps[0].loss, rel=1e-3)  # something was trained
    assert "lora_" in report.parameter


@pytest.mark.slow
def test_another_scaling_in_peft_is_caught(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = adapter_alignment.with_peft

    def changed(model: object, directory: Path, config: RunConfig) -> object:
        file = directory / "adapter_config.json"
        file.write_text(file.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
        return original(model, directory, config)

    monkeypatch.setattr("mindvl_train.checks.plain.with_peft", changed)
    report = check_alignment(make_config(steps=4, adapter=LORA), tmp_path / "both")
    assert {"loss", "grad_norm"} <= set(report.beyond)


def test_dropout_is_refused(make_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(TrainError, match=r"adapter\.dropout: is 0\.1, but PEFT draws other masks"):
        check_adapter(make_config(adapter=replace(LORA, dropout=0.1)))
