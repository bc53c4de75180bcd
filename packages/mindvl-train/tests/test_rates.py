# SPDX-License-Identifier: Apache-2.0
"""The learning rate of every parameter, worked out by hand, in the groups of the real optimizer and in every layout.

As a program this file is one of the processes.
"""

import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mindvl_model import set_up_device
from mindvl_model.parallel_config import BuildConfig, ParallelConfig
from mindvl_model.testing.ranks import run_ranks
from mindvl_model.testing.tiny import smallest_config
from mindvl_train import (
    CheckpointConfig,
    ModelSection,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainError,
    run_training,
)
from mindvl_train.config import LayerDecay, PartRates
from mindvl_train.rates import learning_rate, part_factors, rate_factor

# Peak 1e-3; both encoder and decoder have two layers.
SCHEDULE = ScheduleConfig(
    steps=4,
    peak_lr=1e-3,
    min_lr=1e-4,
    lr_warmup_ratio=0.0,
    peak_lr_by_part=PartRates(vision=1e-4, projector=2e-3, head=5e-4),
    layer_decay=LayerDecay(vision=0.5, language=0.9),
)
# Factors to peak_lr: part times d^(L - i), d^(L + 1) before the layers, 1 after them.
FACTORS = {
    "vision.patch_embed.weight": 0.1 * 0.125,
    "vision.blocks.layers.0.mlp.linear_fc1.bias": 0.1 * 0.25,
    "vision.blocks.layers.1.self_attention.linear_qkv.weight": 0.1 * 0.5,
    "projector.norm.weight": 2.0,
    "projector.fc2.weight": 2.0,
    "language.embedding.word_embeddings.weight": 0.729,
    "language.decoder.layers.0.input_layernorm.weight": 0.81,
    "language.decoder.layers.1.mlp.linear_fc2.weight": 0.9,
    "language.decoder.final_layernorm.weight": 1.0,
    "language.output_layer.weight": 0.5,
    "language.mtp.layers.0.transformer_layer.mlp.linear_fc1.weight": 1.0,
}


def test_rates_of_ten_steps_by_hand() -> None:
    config = ScheduleConfig(steps=10, peak_lr=1.0, min_lr=0.2, lr_warmup_ratio=0.2)
    rates = [learning_rate(config, step) for step in range(10)]
    # Two steps up, then 0.2 + 0.4 * (1 + cos(pi * k / 8)) for k = 1..8.
    by_hand = [0.5, 1.0, 0.96955, 0.88284, 0.75307, 0.6, 0.44693, 0.31716, 0.23045, 0.2]
    assert rates == pytest.approx(by_hand, abs=1e-5)


def test_without_warm_up_the_cosine_starts_at_once() -> None:
    config = ScheduleConfig(steps=4, peak_lr=2.0, lr_warmup_ratio=0.0)
    rates = [learning_rate(config, step) for step in range(4)]
    assert rates == pytest.approx([2 * 0.853553, 1.0, 2 * 0.146447, 0.0], abs=1e-5)


def test_a_rate_depends_on_the_step_alone() -> None:
    config = ScheduleConfig(steps=1000, peak_lr=1e-5, min_lr=1e-6)
    assert learning_rate(config, 0) == pytest.approx(1e-7)
    assert learning_rate(config, 99) == pytest.approx(1e-5)
    assert learning_rate(config, 549) == pytest.approx(5.5e-6)
    assert learning_rate(config, 999) == pytest.approx(1e-6)


@pytest.mark.parametrize(("name", "factor"), FACTORS.items())
def test_the_rate_of_a_parameter_is_that_of_its_part_and_layer(name: str, factor: float) -> None:
    assert rate_factor(name, SCHEDULE, smallest_config()) == pytest.approx(factor, rel=1e-12)


def test_a_recipe_that_names_no_rate_gives_every_parameter_that_of_the_schedule() -> None:
    schedule = ScheduleConfig(steps=4, peak_lr=1e-3)
    assert {rate_factor(name, schedule, smallest_config()) for name in FACTORS} == {1.0}


def test_every_group_of_the_optimizer_has_its_rate_and_its_weight_decay() -> None:
    set_up_device()
    from mindvl_model.model import MindVLModel
    from mindvl_train.megatron.optimizer import build_optimizer, update, wrap_models
    from mindvl_train.parallel_state import process_groups

    config = smallest_config()
    with process_groups(set_up_device(), seed=0):
        model = MindVLModel(config, BuildConfig())
        optimizer = build_optimizer(
            wrap_models([model]),
            OptimizerConfig(weight_decay=0.1, clip_grad_norm=0.0),
            rate_factor=lambda name: rate_factor(name, SCHEDULE, config),
        )
        for parameter in model.parameters():
            parameter.main_grad.zero_()
        optimizer.prepare_grads()
        update(optimizer, 1e-3, 1.0)
        sizes: dict[tuple[float, float], int] = {}
        for group in optimizer.param_groups:
            key = (round(group["lr"], 12), round(group["weight_decay"], 12))
            sizes[key] = sizes.get(key, 0) + sum(one.numel() for one in group["params"])
        expected: dict[tuple[float, float], int] = {}
        for name, parameter in model.named_parameters():
            by_hand = next((value for prefix, value in _PREFIXES.items() if name.startswith(prefix)), None)
            assert by_hand is not None, name
            key = (round(1e-3 * by_hand, 12), 0.0 if parameter.ndim == 1 else 0.1)
            expected[key] = expected.get(key, 0) + parameter.numel()
    assert {key: size for key, size in sizes.items() if size} == expected


_PREFIXES = {
    "vision.patch_embed": 0.0125,
    "vision.blocks.layers.0": 0.025,
    "vision.blocks.layers.1": 0.05,
    "projector": 2.0,
    "language.embedding": 0.729,
    "language.decoder.layers.0": 0.81,
    "language.decoder.layers.1": 0.9,
    "language.decoder.final": 1.0,
    "language.output_layer": 0.5,
}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"trainable": ("language",)}, r"schedule.peak_lr_by_part.vision: is 0.0001, but vision is not trained"),
        ({"tied": True}, r"schedule.peak_lr_by_part.head: .* tied to the embedding"),
    ],
)
def test_a_rate_without_parameters_is_refused(
    make_config: Callable[..., RunConfig], changes: dict[str, Any], why: str
) -> None:
    model = smallest_config(vocab_size=264, tie_embeddings=changes.pop("tied", False))
    section = ModelSection(vision=model.vision, language=model.language)
    with pytest.raises(ValueError, match=why):
        make_config(schedule=SCHEDULE, model=section, **changes)


def test_rates_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="vision: must be a finite number >= 0"):
        PartRates(vision=-1.0)
    with pytest.raises(ValueError, match=r"language: must be in \(0, 1\], got 1.5"):
        LayerDecay(language=1.5)
    with pytest.raises(ValueError, match="peak_lr_by_part: scales peak_lr, which is 0"):
        ScheduleConfig(steps=1, peak_lr=0.0, peak_lr_by_part=PartRates(vision=1e-4))


def test_the_rates_of_parts_are_those_of_the_recipe(make_config: Callable[..., RunConfig]) -> None:
    found = part_factors(make_config(schedule=SCHEDULE))
    assert found == pytest.approx({"vision": 0.1, "projector": 2.0, "head": 0.5})


@pytest.mark.slow
def test_the_alignment_check_refuses_rates_that_it_does_not_compare(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    from mindvl_train.checks.alignment import check_alignment

    with pytest.raises(TrainError, match=r"schedule\.peak_lr_by_part and schedule\.layer_decay"):
        check_alignment(make_config(schedule=SCHEDULE), tmp_path / "check")


@pytest.mark.slow
@pytest.mark.multi
def test_every_layout_trains_with_the_rates_of_one_process(
    make_config: Callable[..., RunConfig], read_tensors: Callable[[Path], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    deep = smallest_config(vocab_size=264)
    deep = replace(deep, language=replace(deep.language, num_layers=4))

    def config(out: str, **changes: Any) -> RunConfig:
        return make_config(
            out,
            model=ModelSection(vision=deep.vision, language=deep.language),
            schedule=SCHEDULE,
            checkpoints=CheckpointConfig(every_steps=1, keep_last=9),
            # Adam's first steps follow the sign of a gradient, so that rounding of nearly zero ones would show: damp them.
            optimizer=OptimizerConfig(epsilon=1e-4),
            **changes,
        )

    expected = read_tensors(run_training(config("one")).checkpoint)
    layouts = {
        "tp2": ParallelConfig(tp_size=2),
        "pp2vpp2": ParallelConfig(pp_size=2, virtual_stages=2),
        "dp2": ParallelConfig(),
    }
    runs = [config(name, parallel=parallel) for name, parallel in layouts.items()]
    job = tmp_path / "job"
    job.write_bytes(pickle.dumps(runs))
    imports = ("mindvl_train.weights", "mindvl_train.loop", "transformers")
    run_ranks([__file__, str(job)], 2, timeout_s=300, imports=imports)
    for run in runs:
        found = read_tensors(run.out / "checkpoints" / "step-00000004")
        for name, tensor in expected.items():
            tolerance = 1e-4 * float(tensor.abs().max())
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=f"{run.out.name} {name}")


if __name__ == "__main__":
    for given in pickle.loads(Path(sys.argv[1]).read_bytes()):
        run_training(given)
    os._exit(0)
