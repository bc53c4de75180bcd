# SPDX-License-Identifier: Apache-2.0
"""A Qwen2.5-VL directory of transformers is unchanged after loading and export."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers.video_utils import VideoMetadata

from mindvl_model import ModelError
from mindvl_model.hf.directory_config import config_from_directory
from mindvl_model.hf.export import export_hf_directory
from mindvl_model.hf.load import load_hf_directory
from mindvl_model.hf.processor_files import ProcessorSettings, VideoSettings
from mindvl_model.testing.tiny import save_qwen2_5_vl, smallest_config, smallest_deepseek_v3, smallest_qwen2_5_vl

VIDEO = VideoSettings(fps=1.0, min_frames=2, min_pixels=28 * 28, max_pixels=28 * 28 * 6)
SETTINGS = ProcessorSettings(min_pixels=28 * 28, max_pixels=28 * 28 * 20, video=VIDEO)


@pytest.fixture(params=[(False, torch.float32), (True, torch.bfloat16)], ids=["own head", "tied head, bf16"])
def both(
    request: pytest.FixtureRequest, make_model: Callable[..., Any], tokenizer_directory: Path, tmp_path: Path
) -> tuple[Path, Path]:
    """A directory saved by transformers, and the export of the model loaded from it."""
    tied, dtype = request.param
    published, exported = tmp_path / "published", tmp_path / "exported"
    save_qwen2_5_vl(smallest_qwen2_5_vl(vocab_size=270, tie_embeddings=tied), published, dtype=dtype)
    config = config_from_directory(published)
    model = make_model(config, seed=5, dtype=dtype)
    report = load_hf_directory(model, config, published)
    assert report.converted == {}
    assert report.skipped == report.redundant == ()
    export_hf_directory(model, config, exported, tokenizer=tokenizer_directory, processor=SETTINGS)
    return published, exported


def test_weights_come_back_bit_by_bit_under_their_names(both: tuple[Path, Path]) -> None:
    before, after = (load_file(directory / "model.safetensors") for directory in both)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name


def test_transformers_reads_the_same_configuration(both: tuple[Path, Path]) -> None:
    before, after = (AutoConfig.from_pretrained(directory) for directory in both)
    for part in ("text_config", "vision_config"):
        expected, actual = (getattr(config, part).to_dict() for config in (before, after))
        for name in ("max_window_layers", "dtype"):  # without effect, and present outside the section
            expected.pop(name, None), actual.pop(name, None)
        assert {name: actual[name] for name in expected} == expected
    assert after.dtype == before.dtype
    assert after.tie_word_embeddings == before.tie_word_embeddings
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    assert [getattr(after, name) for name in ids] == [getattr(before, name) for name in ids] == [5, 6, 3, 4]


def test_the_directory_is_laid_out_as_the_published_ones(both: tuple[Path, Path]) -> None:
    document = json.loads((both[1] / "config.json").read_text())
    assert document["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    assert document["model_type"] == "qwen2_5_vl"
    assert document["rope_scaling"] == {"type": "mrope", "mrope_section": [1, 1, 2]}
    assert document["vision_config"]["tokens_per_second"] == 2
    assert not list(both[1].glob("*.py"))
    images = json.loads((both[1] / "preprocessor_config.json").read_text())
    assert (images["min_pixels"], images["max_pixels"], images["merge_size"]) == (784, 15680, 2)


@torch.no_grad()
def test_the_exported_processor_and_model_generate_from_images_and_videos(both: tuple[Path, Path]) -> None:
    processor = AutoProcessor.from_pretrained(both[1])
    assert isinstance(processor, Qwen2_5_VLProcessor)
    processor.tokenizer.padding_side = "left"
    models = [AutoModelForImageTextToText.from_pretrained(directory).eval() for directory in both]
    assert isinstance(models[1], Qwen2_5_VLForConditionalGeneration)
    noise = np.random.default_rng(0)
    image = Image.fromarray(noise.integers(0, 256, (56, 84, 3), dtype=np.uint8))
    frames = torch.from_numpy(noise.integers(0, 256, (8, 3, 56, 56), dtype=np.uint8))
    inputs = processor(
        text=[
            "<|vision_start|><|image_pad|><|vision_end|>?",
            "what is <|vision_start|><|video_pad|><|vision_end|> after <|vision_start|><|image_pad|><|vision_end|>?",
        ],
        images=[image, image],
        videos=[frames],
        video_metadata=[VideoMetadata(total_num_frames=8, fps=2.0, duration=4.0)],
        return_tensors="pt",
        padding=True,
    )
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 6], [1, 4, 6]]
    assert inputs["video_grid_thw"].tolist() == [[2, 4, 4]]  # eight frames at 2 a second, one a second taken
    answers = [model.generate(**inputs, max_new_tokens=4, do_sample=False, eos_token_id=None) for model in models]
    assert torch.equal(*answers)


def test_models_that_transformers_cannot_represent_are_refused_before_writing(
    make_model: Callable[..., Any], tokenizer_directory: Path, tmp_path: Path
) -> None:
    plain, qwen, latent = smallest_config(vocab_size=270), smallest_qwen2_5_vl(vocab_size=270), smallest_deepseek_v3()
    cases = {
        "vision.norm_epsilon: .*got 1e-05": replace(plain, vision=replace(plain.vision, norm_epsilon=1e-5)),
        "head_dim=8 times num_heads=4 equals hidden_size=24": replace(
            qwen, language=replace(qwen.language, hidden_size=24)
        ),
        "vision.rotary_base: .*got 500.0": replace(qwen, vision=replace(qwen.vision, rotary_base=500.0)),
        "language.attention.latent_norm_epsilon: .*got 1e-05": replace(
            latent,
            language=replace(latent.language, attention=replace(latent.language.attention, latent_norm_epsilon=1e-5)),
        ),
        "language.num_shared_experts: .*got 0": smallest_deepseek_v3(num_shared_experts=0),
    }
    for message, config in cases.items():
        with pytest.raises(ModelError, match=message):
            export_hf_directory(
                make_model(config), config, tmp_path / "out", tokenizer=tokenizer_directory, processor=SETTINGS
            )
        assert not list(tmp_path.iterdir())
