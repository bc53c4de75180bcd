# SPDX-License-Identifier: Apache-2.0
"""Samples of a pack do not see each other; where they do, the check says so."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mindvl_data import Batch, Loader
from mindvl_ops import Segments
from mindvl_train import ModelSection, RunConfig, TrainError
from mindvl_train.checks import packing
from mindvl_train.checks.packing import PackingReport, alone, poisoned
from mindvl_train.resolved_run import tokenized_model


@pytest.fixture
def pack(make_config: Callable[..., RunConfig]) -> Batch:
    config = make_config()
    with Loader(config.data, global_batch_size=8, position_kind="rope") as loader:
        return max((next(loader) for _ in range(8)), key=lambda pack: len(pack.samples))


def test_samples_taken_out_of_a_pack_are_the_pack_again_when_joined(pack: Batch) -> None:
    singles = [alone(pack, number) for number in range(len(pack.samples))]
    length = int(pack.cu_seqlens[len(pack.samples)])
    for name, whole in (("input_ids", pack.input_ids[:length]), ("labels", pack.labels[:length])):
        assert torch.equal(torch.cat([getattr(one, name) for one in singles]), whole)
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(torch.cat([getattr(one, name) for one in singles]), getattr(pack, name))
    assert sum(one.num_loss_tokens for one in singles) == pack.num_loss_tokens
    assert all(int(one.position_ids[0, 0]) == 0 for one in singles)


def test_a_poison_changes_words_and_pixels_of_one_sample_only(
    pack: Batch, make_config: Callable[..., RunConfig]
) -> None:
    model_config = tokenized_model(make_config())
    before = [alone(pack, number) for number in range(len(pack.samples))]
    for number in range(len(pack.samples)):
        changed = poisoned(pack, number, model_config)
        after = [alone(changed, other) for other in range(len(pack.samples))]
        for other, (one, two) in enumerate(zip(before, after, strict=True)):
            assert torch.equal(one.input_ids, two.input_ids) == (other != number)
            assert torch.equal(one.labels, two.labels)
            if len(one.pixel_values):
                assert torch.equal(one.pixel_values, two.pixel_values) == (other != number)
        placeholders = pack.input_ids == model_config.tokens.image
        assert torch.equal(changed.input_ids == model_config.tokens.image, placeholders)


def test_a_pack_of_one_word_is_poisoned_too(pack: Batch, make_config: Callable[..., RunConfig]) -> None:
    model_config = tokenized_model(make_config())
    special = torch.tensor([token for token in vars(model_config.tokens).values() if token is not None])
    word = next(int(token) for token in pack.input_ids if token not in special)
    same = replace(pack, input_ids=torch.where(torch.isin(pack.input_ids, special), pack.input_ids, word))
    changed = poisoned(same, 0, model_config).input_ids[: int(pack.cu_seqlens[1])]
    assert int((changed != same.input_ids[: len(changed)]).sum()) > 0
    assert int(changed.max()) < model_config.language.vocab_size


def report_of(config: RunConfig) -> PackingReport:
    """In this process."""
    return PackingReport(layout="one", processes=1, **packing._check(config))


@pytest.mark.slow
def test_packed_packs_equal_single_samples_for_every_family(make_config: Callable[..., RunConfig]) -> None:
    from mindvl_model.testing.tiny import smallest_deepseek_v3, smallest_qwen3_moe

    for model in (None, smallest_qwen3_moe(vocab_size=264), smallest_deepseek_v3(vocab_size=264)):
        config = make_config()
        if model is not None:
            config = replace(config, model=ModelSection(vision=model.vision, language=model.language))
        report = report_of(config)
        assert report.holds, report
        assert report.samples >= 2


@pytest.mark.slow
def test_bf16_is_judged_by_the_rounding_noise_of_the_same_pack(make_config: Callable[..., RunConfig]) -> None:
    report = report_of(make_config(precision="bf16"))
    assert report.holds, report
    assert report.gradient > packing.FP32_BOUND  # it was computed in bf16
    assert report.loss_bound > packing.FP32_BOUND
    assert not replace(report, neighbour=1e-2).holds


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_pack_whose_samples_see_each_other_is_found(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    from mindvl_model import model

    class Blind(Segments):
        """Knows where the pack ends and nothing of the samples in it."""

        @classmethod
        def from_cu_seqlens(cls, cu_seqlens: Any) -> Segments:
            return Segments.from_cu_seqlens(cu_seqlens[[0, -1]])

    monkeypatch.setattr(model, "Segments", Blind)
    report = report_of(make_config(precision=precision))
    assert not report.holds
    assert min(report.loss, report.gradient, report.neighbour) > 1e-3


def test_a_pack_of_one_sample_proves_nothing_and_is_refused(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    data = replace(config.data, sources=(replace(config.data.sources[0], first=1),))
    with Loader(data, global_batch_size=1, position_kind="rope") as loader:
        length = next(loader).samples[0].length
    short = replace(data, packing=replace(data.packing, seq_length=-(-length // 8) * 8))
    with pytest.raises(TrainError, match="none of the first 8 packs has two samples"):
        report_of(replace(config, data=short))
