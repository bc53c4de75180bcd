# SPDX-License-Identifier: Apache-2.0
"""One update: gradients are those of the mean loss, and a broken number changes nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from mindvl_model import MindVLModel, set_up_device
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import randomize, smallest_config, smallest_deepseek_v3
from mindvl_train import OptimizerConfig, TrainError
from mindvl_train.interfaces import Batch, SampleReference

CONFIG = smallest_config()


@dataclass(frozen=True)
class Pack:
    """A pack as the loader would give it."""

    inputs: dict[str, Any]
    samples: tuple[SampleReference, ...] = ()

    @property
    def num_loss_tokens(self) -> int:
        return int((self.inputs["labels"] != -100).sum())

    def to(self, device: torch.device) -> Self:
        return self

    def model_inputs(self) -> dict[str, Any]:
        return self.inputs


class Packs:
    """A source of given packs."""

    def __init__(self, packs: list[dict[str, Any]]) -> None:
        self.packs = iter([Pack(pack) for pack in packs])

    def __next__(self) -> Batch:
        return next(self.packs)

    def is_used_up(self) -> bool:
        return False

    def rebuild(self, batch: Any, failed: Sequence[bool]) -> Batch:
        raise AssertionError("a single process must not agree with others")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(
        self,
        state: dict[str, Any],
        *,
        accept_change: str | None = None,
        parent_log: Path | None = None,
        where: str = "checkpoint",
    ) -> None: ...


@pytest.fixture
def model() -> Iterator[MindVLModel]:
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_train.parallel_state import process_groups

    with process_groups(set_up_device(), seed=0):
        built = MindVLModel(CONFIG, BuildConfig())
        randomize(built)
        yield built


def packs() -> list[dict[str, Any]]:
    return [
        pack_segments(
            [random_segment(CONFIG, [(1, 4, 6)], seed=1), random_segment(CONFIG, num_text=20, seed=2)], padding=2
        ),
        pack_segments([random_segment(CONFIG, num_text=7, seed=3)]),
    ]


def values(model: MindVLModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def one_step(model: MindVLModel, inputs: list[dict[str, Any]], *, may_update: bool = True, **optimizer: Any) -> Any:
    from mindvl_train.megatron.optimizer import build_optimizer, wrap_models
    from mindvl_train.megatron.pipeline import prepare_schedule
    from mindvl_train.parallel_state import ParallelState
    from mindvl_train.step import train_step

    wrapped = wrap_models([model])
    built = build_optimizer(wrapped, OptimizerConfig(**optimizer))
    prepare_schedule(wrapped, built)
    return train_step(
        wrapped,
        built,
        Packs(inputs),
        num_microbatches=2,
        learning_rate=0.01,
        ranks=ParallelState(rank=0, device=torch.device("cpu")),
        may_update=lambda totals, loss_sum, packs: may_update,
    )


def plain_update(model: MindVLModel, *, clip: float, weight_decay: float) -> tuple[dict[str, torch.Tensor], float]:
    """The same update by torch alone: the mean loss over all loss tokens, AdamW by hand for its first step."""
    sums = [model(**pack) for pack in packs()]
    count = sum(int((pack["labels"] != -100).sum()) for pack in packs())
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(torch.stack(sums).sum() / count, parameters)
    norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
    scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
    updated = {}
    for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
        clipped = gradient * scale
        decay = weight_decay if parameter.ndim > 1 else 0.0  # norms and biases are not decayed
        updated[name] = parameter.detach() * (1 - 0.01 * decay) - 0.01 * clipped / (clipped.abs() + 1e-8)
    return updated, norm


@pytest.mark.parametrize(("clip", "weight_decay"), [(0.1, 0.1), (0.0, 0.0)], ids=["clipped and decayed", "neither"])
def test_an_update_is_that_of_the_mean_loss_over_all_loss_tokens(
    model: MindVLModel, clip: float, weight_decay: float
) -> None:
    expected, norm = plain_update(model, clip=clip, weight_decay=weight_decay)
    with torch.no_grad():
        loss_sum = sum(float(model(**pack)) for pack in packs())
    report = one_step(model, packs(), clip_grad_norm=clip, weight_decay=weight_decay)
    assert report.grad_norm == pytest.approx(norm, rel=1e-5)
    assert float(report.loss_sum) == pytest.approx(loss_sum, rel=1e-5)
    assert int(report.num_loss_tokens) == sum(int((pack["labels"] != -100).sum()) for pack in packs())
    assert report.num_tokens == sum(len(pack["input_ids"]) for pack in packs())
    for name, value in values(model).items():
        # Where a gradient is nearly zero its sign decides the first step of Adam, so a few entries may differ.
        near = (value - expected[name]).abs() < 2e-5
        assert near.float().mean() > 0.98, name


def test_a_step_that_may_not_update_changes_nothing_and_counts_no_loss_tokens(model: MindVLModel) -> None:
    before = values(model)
    report = one_step(model, packs(), may_update=False)
    assert (report.was_applied, float(report.loss_sum), report.num_loss_tokens) == (False, 0.0, 0)
    assert report.grad_norm > 0
    for name, value in values(model).items():
        assert torch.equal(value, before[name]), name


def test_a_step_without_loss_tokens_has_no_gradient(model: MindVLModel) -> None:
    silent = packs()
    for pack in silent:
        pack["labels"][:] = -100
        pack["loss_positions"] = torch.tensor([], dtype=torch.int64)
    report = one_step(model, silent, weight_decay=0.0)
    assert (report.grad_norm, float(report.loss_sum), int(report.num_loss_tokens)) == (0.0, 0.0, 0)


def test_a_source_that_ends_is_one_named_error(model: MindVLModel) -> None:
    with pytest.raises(TrainError, match="before the schedule ended"):
        one_step(model, packs()[:1])


def test_the_routers_of_experts_take_the_load_of_each_step() -> None:
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_train.parallel_state import process_groups

    config = smallest_deepseek_v3()
    language = config.language
    assert language.experts is not None
    inputs = [pack_segments([random_segment(config, num_text=length, seed=length)]) for length in (20, 9)]
    with process_groups(set_up_device(), seed=0):
        model = MindVLModel(config, BuildConfig())
        randomize(model)
        before = {name: value.clone() for name, value in model.named_buffers() if name.endswith("expert_bias")}
        one_step(model, inputs, may_update=False)
        assert all(torch.equal(dict(model.named_buffers())[name], bias) for name, bias in before.items())
        report = one_step(model, inputs)
        assert torch.isfinite(report.loss_sum)
        statistics = {pack.layer: pack for pack in model.router_statistics()}
        assert set(statistics) == {1, 2, 3}  # two decoder layers with experts, one that predicts a token further
        assert int(statistics[1].tokens_per_expert.sum()) == 29 * language.experts.experts_per_token
        for name, bias in before.items():
            moved = dict(model.named_buffers())[name] - bias
            assert moved.abs().max() == pytest.approx(language.experts.bias_update_rate, rel=1e-3), name
