# SPDX-License-Identifier: Apache-2.0
"""A pack through transformers' own Qwen2.5-VL: loss and gradients are those of its samples, one call for each."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from mindvl_data import IGNORE_INDEX, Batch, DataConfig, DataError, ImageConfig, Loader
from mindvl_data.collate import collate
from mindvl_data.images import cut_patches
from mindvl_data.preprocessing import WITHOUT_MODEL, Preprocessing
from mindvl_data.types import PackedSample, SampleReference, TokenizedSample

IMAGE, VIDEO = 5, 6
TOLERANCE = 1e-5  # float32, relative


@pytest.fixture
def model(tiny_qwen2_5_vl: Any) -> Any:
    return tiny_qwen2_5_vl


def tokenized(seed: int, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> TokenizedSample:
    """Text, media, text; half of the text has labels."""
    generator = np.random.default_rng(seed)
    pieces = [generator.integers(7, 64, 4)]
    for placeholder, grids in ((IMAGE, images), (VIDEO, videos)):
        for grid in grids:
            pieces += [[3], [placeholder] * (int(np.prod(grid)) // 4), [4], generator.integers(7, 64, 3)]
    ids = np.concatenate(pieces).astype(np.int64)
    labels = np.full(len(ids), IGNORE_INDEX, np.int64)
    wanted = (generator.random(len(ids) - 1) < 0.5) & (ids[1:] >= 7)
    labels[:-1][wanted] = ids[1:][wanted]
    patches = [sum(int(np.prod(grid)) for grid in grids) for grids in (images, videos)]
    return TokenizedSample(
        input_ids=ids,
        labels=labels,
        pixel_values=generator.integers(0, 256, (patches[0], 588), np.uint8),
        image_grid_thw=np.array(images, np.int64).reshape(-1, 3),
        pixel_values_videos=generator.integers(0, 256, (patches[1], 1176), np.uint8),
        video_grid_thw=np.array(videos, np.int64).reshape(-1, 3),
        seconds_per_grid=np.full(len(videos), 0.5),
    )


SAMPLES = (
    tokenized(0, images=[(1, 6, 4)]),
    tokenized(1),
    tokenized(2, images=[(1, 2, 8), (1, 4, 4)]),
    tokenized(3, images=[(1, 4, 2)], videos=[(2, 4, 6)]),
)


def packed(
    samples: Sequence[TokenizedSample], *, pad_multiple: int = 37, kind: Any = "mrope", patch_dim: int = 588
) -> Batch:
    references = tuple(
        SampleReference(
            source="s", epoch=0, shard="0.tar", sample_index=number, key=str(number), length=len(sample.input_ids)
        )
        for number, sample in enumerate(samples)
    )
    return collate(
        PackedSample(samples=tuple(samples), references=references), step=1, position_kind=kind, pad_id=0,
        image_pad_id=IMAGE, video_pad_id=VIDEO, pad_multiple=pad_multiple, patch_dim=patch_dim, spatial_merge_size=2,
    )  # fmt: skip


def normalized(patches: np.ndarray, num_frames: int) -> torch.Tensor:
    """Pixel by pixel, as the definition says."""
    pixels = torch.from_numpy(patches).reshape(-1, 3, num_frames, 196).double() / 255
    for channel in range(3):
        pixels[:, channel] = (pixels[:, channel] - WITHOUT_MODEL.image_mean[channel]) / WITHOUT_MODEL.image_std[channel]
    return torch.cat([pixels] * (2 // num_frames), dim=2).flatten(1).float()


def alone(model: Any, sample: TokenizedSample) -> torch.Tensor:
    """Summed loss of one sample, with positions and the label shift by transformers."""
    ids = torch.from_numpy(sample.input_ids)[None]
    inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": ids.eq(IMAGE).int() + 2 * ids.eq(VIDEO).int()}
    if len(sample.image_grid_thw):
        inputs |= {"pixel_values": normalized(sample.pixel_values, 1)}
        inputs |= {"image_grid_thw": torch.from_numpy(sample.image_grid_thw)}
    if len(sample.video_grid_thw):
        inputs |= {"pixel_values_videos": normalized(sample.pixel_values_videos, 2)}
        inputs |= {"video_grid_thw": torch.from_numpy(sample.video_grid_thw)}
        inputs |= {"second_per_grid_ts": torch.from_numpy(sample.seconds_per_grid)}
    logits = model(**inputs).logits[0]
    return F.cross_entropy(logits, torch.from_numpy(sample.labels), ignore_index=IGNORE_INDEX, reduction="sum")


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    assert all(gradient is not None for gradient in found.values())
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_loss_and_gradients_of_a_pack_are_those_of_its_samples(model: Any, attention: str) -> None:
    model.set_attn_implementation(attention)
    packs = [packed(SAMPLES[:3]), packed(SAMPLES[3:] + SAMPLES[1:2])]
    assert all(len(pack.cu_seqlens) - 1 > len(pack.samples) for pack in packs)  # with a segment of padding
    total = sum(pack.num_loss_tokens for pack in packs)
    expected = sum(alone(model, sample) for sample in (*SAMPLES, SAMPLES[1])) / total
    expected.backward()
    wanted = gradients(model)
    loss = sum(model(**pack.to_transformers(num_loss_tokens=total)).loss for pack in packs)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(
            gradient, wanted[name], rtol=TOLERANCE, atol=TOLERANCE * float(wanted[name].abs().max()), msg=name
        )


def test_the_loss_of_one_pack_is_the_mean_over_its_label_tokens(model: Any) -> None:
    pack = packed(SAMPLES[:3])
    expected = sum(alone(model, sample) for sample in SAMPLES[:3]) / pack.num_loss_tokens
    assert model(**pack.to_transformers()).loss.item() == pytest.approx(expected.item(), rel=TOLERANCE)


def test_a_pack_without_labels_has_loss_zero_and_not_nan(model: Any) -> None:
    silent = replace(SAMPLES[0], labels=np.full_like(SAMPLES[0].labels, IGNORE_INDEX))
    loss = model(**packed([silent]).to_transformers()).loss
    assert loss.item() == 0


def test_samples_of_a_pack_do_not_see_each_other_whatever_the_cache_is_set_to(model: Any) -> None:
    model.config.text_config.use_cache = model.config.use_cache = True
    first, other = packed(SAMPLES[:2], pad_multiple=1), packed((SAMPLES[3], SAMPLES[1]), pad_multiple=1)
    length = len(SAMPLES[1].input_ids)
    tails = [model(**pack.to_transformers()).logits[0, -length:] for pack in (first, other)]
    torch.testing.assert_close(*tails, rtol=1e-4, atol=1e-5)


def test_the_loss_of_a_pack_is_that_of_a_model_with_other_patches_and_normalization() -> None:
    """Qwen3-VL: patches of 16 x 16, mean and deviation 0.5, features of inner layers added in the language model."""
    torch.manual_seed(0)
    vision = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 49, "deepstack_visual_indexes": [0]}
    text = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    text |= {
        "intermediate_size": 40,
        "vocab_size": 400,
        "rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 3, "vision_end_token_id": 4}
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(vision_config=vision, text_config=text, **tokens))
    pixels = np.random.default_rng(0).integers(0, 256, (24 + 16 + 16, 768), np.uint8)
    samples = [
        replace(tokenized(0, images=[(1, 6, 4)]), pixel_values=pixels[:24]),
        replace(tokenized(1), pixel_values=pixels[:0]),
        replace(tokenized(2, images=[(1, 2, 8), (1, 4, 4)]), pixel_values=pixels[24:]),
    ]
    losses, start = [], 0
    for sample in samples:
        ids, count = torch.from_numpy(sample.input_ids)[None], len(sample.pixel_values)
        patches = (torch.from_numpy(pixels[start : start + count]).view(-1, 3, 1, 256) / 255 - 0.5) / 0.5
        media = {"pixel_values": patches.repeat(1, 1, 2, 1).flatten(1)} if count else {}
        media |= {"image_grid_thw": torch.from_numpy(sample.image_grid_thw)} if count else {}
        logits = model(input_ids=ids, mm_token_type_ids=ids.eq(IMAGE).int(), **media).logits[0]
        labels = torch.from_numpy(sample.labels)
        losses.append(F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum"))
        start += count
    pack = packed(samples, kind="mrope_frames", patch_dim=768)
    half = (0.5, 0.5, 0.5)
    inputs = pack.to_transformers(
        position_kind="mrope_frames", model=Preprocessing(patch_size=16, image_mean=half, image_std=half)
    )
    expected = torch.stack(losses).sum().item() / pack.num_loss_tokens
    assert model(**inputs).loss.item() == pytest.approx(expected, rel=TOLERANCE)


def test_pixels_are_those_of_the_published_processor() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (56, 84, 3), np.uint8)
    processor = Qwen2VLImageProcessorPil(min_pixels=784, max_pixels=1 << 20)
    expected = processor(Image.fromarray(pixels), return_tensors="pt")
    patches = torch.from_numpy(cut_patches(pixels[None], ImageConfig()))
    batch = replace(packed([tokenized(0, images=[(1, 4, 6)])]), pixel_values=patches)
    inputs = batch.to_transformers()
    assert torch.equal(inputs["image_grid_thw"], expected["image_grid_thw"])
    torch.testing.assert_close(inputs["pixel_values"], expected["pixel_values"], rtol=1e-6, atol=1e-6)


def test_positions_of_a_model_that_counts_tokens_have_one_axis() -> None:
    inputs = packed(SAMPLES[:2], kind="rope").to_transformers(position_kind="rope")
    lengths = [*(len(sample.input_ids) for sample in SAMPLES[:2])]
    lengths.append(-sum(lengths) % 37)
    assert inputs["position_ids"].tolist() == [[position for length in lengths for position in range(length)]]


@pytest.mark.parametrize(("made", "asked"), [("rope", "mrope"), ("mrope", "rope")])
def test_positions_of_the_other_kind_are_refused(made: Any, asked: Any) -> None:
    with pytest.raises(DataError, match=rf"position_kind is '{asked}'.*the loader uses '{made}'"):
        packed(SAMPLES[:1], kind=made).to_transformers(position_kind=asked)


def test_a_batch_without_pixels_is_refused(make_config: Callable[..., DataConfig]) -> None:
    with Loader(make_config(num_threads=0), global_batch_size=1, position_kind="mrope", with_pixels=False) as loader:
        batch = next(batch for batch in loader if len(batch.image_grid_thw))
    with pytest.raises(DataError, match=r"pixel_values has 0 patches, but image_grid_thw requires \d+"):
        batch.to_transformers()
