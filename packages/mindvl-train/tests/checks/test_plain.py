# SPDX-License-Identifier: Apache-2.0
"""A packed sequence split into samples again: every sample with its own images, and an update that leaves frozen parts alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from mindvl_data import Batch, Loader
from mindvl_model.hf.export import write_hf_directory
from mindvl_model.hf.inputs import normalized_pixels
from mindvl_model.hf.processor_files import ProcessorSettings
from mindvl_model.megatron.process import single_process
from mindvl_model.parallel_config import BuildConfig
from mindvl_model.parameters import named_tensors
from mindvl_model.testing.tiny import randomize, smallest_config, smallest_qwen2_5_vl
from mindvl_train import ModelSection, RunConfig
from mindvl_train.checks.alignment import write_start
from mindvl_train.checks.plain import IGNORE_INDEX, PlainTraining, samples_of
from mindvl_train.resolved_run import tokenized_model


@pytest.fixture
def config(make_config: Callable[..., RunConfig]) -> RunConfig:
    return make_config(phase="warmup")


@pytest.fixture
def packs(config: RunConfig) -> list[Batch]:
    source = Loader(config.data, global_batch_size=2, position_kind="rope")
    try:
        return [next(source) for _ in range(6)]
    finally:
        source.close()


def test_samples_put_end_to_end_are_the_pack(config: RunConfig, packs: list[Batch]) -> None:
    model_config = tokenized_model(config)
    assert any(len(pack.image_grid_thw) > 1 for pack in packs)
    for pack in packs:
        samples = list(samples_of(pack, model_config))
        length = sum(segment.length for segment in pack.samples)
        assert torch.equal(torch.cat([sample["input_ids"][0] for sample in samples]), pack.input_ids[:length])
        assert torch.equal(torch.cat([sample["labels"] for sample in samples]), pack.labels[:length])
        pixels = [sample["pixel_values"] for sample in samples if "pixel_values" in sample]
        assert torch.equal(torch.cat(pixels), normalized_pixels(pack.pixel_values, model_config.vision))
        for sample in samples:
            visual = int((sample["input_ids"] == model_config.tokens.image).sum())
            assert visual == int(sample.get("image_grid_thw", torch.zeros(0, 3)).prod(1).sum()) // 4


def test_transformers_computes_positions_itself_and_others_in_the_pack_are_counted(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """M-RoPE: a pack whose positions count tokens, as without it, differs in every token after an image begins."""
    model = smallest_qwen2_5_vl(vocab_size=264)
    config = make_config(model=ModelSection(vision=model.vision, language=model.language))
    model_config = tokenized_model(config)
    with Loader(config.data, global_batch_size=2, position_kind="mrope") as source:
        packs = [next(source) for _ in range(2)]
    write_start(config, tmp_path / "start")
    assert all("position_ids" not in sample for pack in packs for sample in samples_of(pack, model_config))

    plain = PlainTraining(tmp_path / "start", model_config, config, torch.device("cpu"))
    plain.step(packs, 1e-3)
    assert plain.moved_tokens == 0

    counted = [
        replace(pack, position_ids=torch.cat([torch.arange(n) for n in pack.cu_seqlens.diff().tolist()]).expand(3, -1))
        for pack in packs
    ]
    expected = sum(
        int((pack.position_ids != other.position_ids).any(0).sum()) for pack, other in zip(packs, counted, strict=True)
    )
    plain.step(counted, 1e-3)
    assert plain.moved_tokens == expected > 0


def test_padding_is_no_sample(config: RunConfig, packs: list[Batch]) -> None:
    padded = [pack for pack in packs if len(pack.cu_seqlens) - 1 > len(pack.samples)]
    assert padded
    for pack in padded:
        samples = list(samples_of(pack, tokenized_model(config)))
        assert len(samples) == len(pack.samples)
        assert all(bool((sample["labels"] != IGNORE_INDEX).any()) for sample in samples)


def test_a_warm_up_changes_the_projector_alone(config: RunConfig, packs: list[Batch], tmp_path: Path) -> None:
    write_start(config, tmp_path / "start")
    plain = PlainTraining(
        tmp_path / "start", tokenized_model(config), config, torch.device("cpu"), trust_remote_code=True
    )
    before = {name: parameter.detach().clone() for name, parameter in plain.model.named_parameters()}
    loss, norm = plain.step(packs[:2], 1e-2)
    changed = {name for name, parameter in plain.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert loss > 0
    assert norm > 0
    assert changed
    assert all(".merger." in name for name in changed)


@pytest.mark.parametrize("decoder", ["qwen2_5_vl", "mindvl"])
def test_a_plain_transformers_step_on_packs_has_our_loss_and_gradients(
    config: RunConfig, decoder: str, tmp_path: Path
) -> None:
    model_config = smallest_qwen2_5_vl(vocab_size=264) if decoder == "qwen2_5_vl" else smallest_config(vocab_size=264)
    kind = model_config.position_kind
    with Loader(config.data, global_batch_size=2, position_kind=kind) as loader:
        drawn = [next(loader) for _ in range(16)]
    packs = [pack for pack in drawn if len(pack.cu_seqlens) - 1 > len(pack.samples) > 2][:2]  # samples and padding
    assert len(packs) == 2
    assert all(len(pack.image_grid_thw) > 1 for pack in packs)
    total = sum(pack.num_loss_tokens for pack in packs)

    from mindvl_model.model import MindVLModel  # after the device setup

    with single_process():
        model = MindVLModel(model_config, BuildConfig(dtype=torch.float32))
        randomize(model, 0)
        loss = sum(model(**pack.model_inputs()) for pack in packs) / total
        loss.backward()
        parameters = named_tensors(model)
        write = partial(
            write_hf_directory, stored=torch.float32, config=model_config,
            tokenizer=config.data.tokenizer, processor=ProcessorSettings(min_pixels=784, max_pixels=4704),
        )  # fmt: skip
        write(lambda name: parameters[name].detach(), out=tmp_path / "model")
        write(lambda name: parameters[name].grad, out=tmp_path / "gradients")

    plain, ours = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / name, dtype=torch.float32, trust_remote_code=True)
        for name in ("model", "gradients")
    )
    inputs = [pack.to_transformers(num_loss_tokens=total, position_kind=kind) for pack in packs]
    plain_loss = sum(plain(**each).loss for each in inputs)
    plain_loss.backward()
    assert plain_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    expected = dict(ours.named_parameters())
    for name, parameter in plain.named_parameters():
        largest = expected[name].abs().max().item()
        torch.testing.assert_close(parameter.grad, expected[name].data, rtol=1e-5, atol=1e-5 * largest, msg=name)
