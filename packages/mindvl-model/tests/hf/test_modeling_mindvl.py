# SPDX-License-Identifier: Apache-2.0
"""An exported MindVL directory meets the conditions of the transformers backends of vLLM and SGLang.

The conditions were read in vllm/model_executor/models/transformers (base.py, multimodal.py) and
sglang/srt/models/transformers.py; the tests make the same calls with transformers alone.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor, Qwen3VLProcessor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.video_utils import VideoMetadata

from mindvl_model.hf.directory_config import config_from_directory
from mindvl_model.hf.export import export_hf_directory
from mindvl_model.hf.parity import check_parity
from mindvl_model.hf.processor_files import ProcessorSettings
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen3_moe, smallest_qwen3_vl

NUM_PATCHES = 4 * 6  # an image of 56 x 84 pixels


def _export(config: Any, make_model: Callable[..., Any], tokenizer: Path, directory: Path) -> Path:
    settings = ProcessorSettings(min_pixels=784, max_pixels=7840)  # 10 visual tokens at most
    export_hf_directory(make_model(config), config, directory, tokenizer=tokenizer, processor=settings)
    return directory


@pytest.fixture
def exported(make_model: Callable[..., Any], tokenizer_directory: Path, tmp_path: Path) -> Path:
    """A MindVL directory with a Qwen3 language model."""
    return _export(smallest_config(vocab_size=270), make_model, tokenizer_directory, tmp_path / "mindvl")


@pytest.fixture
def inputs(exported: Path) -> Any:
    """A prompt with one image, with the offsets of the placeholders."""
    processor = AutoProcessor.from_pretrained(exported, trust_remote_code=True)
    noise = np.random.default_rng(0)
    image = Image.fromarray(noise.integers(0, 256, (56, 84, 3), dtype=np.uint8))
    return processor(
        text="<|vision_start|><|image_pad|><|vision_end|>?",
        images=[image],
        return_tensors="pt",
        return_text_replacement_offsets=True,
    )


def test_the_processor_counts_placeholders_from_sizes_alone(exported: Path) -> None:
    processor = AutoProcessor.from_pretrained(exported, trust_remote_code=True)
    counts = processor._get_num_multimodal_tokens(image_sizes=[(56, 84), (2800, 2800)])
    # 10 visual tokens at most: 3 x 3 of them for a square
    assert (counts["num_image_tokens"], counts["num_image_patches"]) == ([6, 9], [NUM_PATCHES, 36])
    counts = processor._get_num_multimodal_tokens(image_sizes=[(2800, 2800)], max_pixels=4 * 784)
    assert counts["num_image_tokens"] == [4]
    counts = processor._get_num_multimodal_tokens(video_sizes=[(4, 280, 280)])
    frames = np.zeros((4, 280, 280, 3), dtype=np.uint8)
    grid = processor.video_processor(videos=[frames], do_sample_frames=False, return_tensors="pt")["video_grid_thw"]
    assert counts["num_video_tokens"] == [int(grid.prod()) // 4]


def test_the_processor_reports_where_each_image_is(inputs: Any) -> None:
    ((entry,),) = inputs["text_replacement_offsets"]
    assert (entry["type"], entry["replacement"]) == ("image", "<|image_pad|>" * 6)


@torch.no_grad()
def test_features_are_given_for_each_image_and_video_and_further_inputs_are_ignored(
    exported: Path, inputs: Any
) -> None:
    model = AutoModel.from_pretrained(exported, trust_remote_code=True).eval()
    first, grid = inputs["pixel_values"], inputs["image_grid_thw"]
    second = torch.rand(4 * 4, first.shape[1], generator=torch.Generator().manual_seed(0))
    expected = [
        model.visual(first, grid_thw=grid).pooler_output,
        model.visual(second, grid_thw=torch.tensor([[1, 4, 4]])).pooler_output,
    ]
    assert [len(tokens) for tokens in expected] == [6, 4]
    both, grids = torch.cat([first, second]), torch.cat([grid, torch.tensor([[1, 4, 4]])])
    further = {"return_dict": True, "mm_token_type_ids": torch.zeros(1, 9)}
    for features in (
        model.get_image_features(both, image_grid_thw=grids, **further),
        model.get_video_features(both, video_grid_thw=grids, **further),
    ):
        for found, tokens in zip(features.pooler_output, expected, strict=True):
            torch.testing.assert_close(found, tokens, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("make_config", [smallest_config, smallest_qwen3_moe, smallest_deepseek_v3])
def test_the_attention_of_an_engine_is_used_in_every_layer_of_the_language_model(
    make_config: Callable[..., Any],
    make_model: Callable[..., Any],
    tokenizer_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = _export(make_config(vocab_size=270), make_model, tokenizer_directory, tmp_path / "mindvl")
    whole = AutoModelForImageTextToText.from_pretrained(directory, trust_remote_code=True).eval()
    assert type(whole).is_backend_compatible()
    called = []

    def attention(module: Any, *arguments: Any, attention_instances: Any, **options: Any) -> Any:
        called.append(attention_instances[module.layer_idx])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *arguments, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "engine", attention)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    config.get_text_config()._attn_implementation = "engine"
    model = AutoModel.from_config(config, trust_remote_code=True).eval()
    model.load_state_dict(whole.model.state_dict())
    assert model.get_decoder() is model.language_model
    assert model.get_encoder(modality="image") is model.visual

    token_ids = torch.tensor([[5, 9, 7, 30]])
    positions = torch.arange(4)[None]
    expected = whole.model(input_ids=token_ids, position_ids=positions).last_hidden_state
    num_layers = config.get_text_config().num_hidden_layers
    outputs = model(
        input_ids=None,
        inputs_embeds=model.get_input_embeddings()(token_ids),
        use_cache=False,
        position_ids=positions,
        attention_instances={layer: f"layer {layer}" for layer in range(num_layers)},
        return_dict=False,
    )
    assert called == [f"layer {layer}" for layer in range(num_layers)]
    assert isinstance(outputs, tuple)
    torch.testing.assert_close(outputs[0], expected, atol=1e-5, rtol=1e-5)


def _composed(deepstack_layers: tuple[int, ...]) -> Any:
    """The vision encoder of Qwen3-VL with the dense Qwen3 decoder."""
    vision = replace(smallest_qwen3_vl().vision, deepstack_layers=deepstack_layers)
    return replace(smallest_config(vocab_size=270), vision=vision)


@pytest.mark.parametrize("deepstack_layers", [(), (1, 0)], ids=["no deepstack", "deepstack"])
def test_the_encoder_of_qwen3_vl_with_qwen3_equals_the_model_that_was_trained(
    deepstack_layers: tuple[int, ...], make_model: Callable[..., Any], tokenizer_directory: Path, tmp_path: Path
) -> None:
    config = _composed(deepstack_layers)
    directory = _export(config, make_model, tokenizer_directory, tmp_path / "mindvl")
    read = config_from_directory(directory)
    assert (read.vision, read.language) == (replace(config.vision, init_std=0.1), config.language)
    report = check_parity(directory, num_inputs=10, trust_remote_code=True)
    assert report.model_type == "mindvl"
    assert {one.kind for one in report.inputs} == {"text", "image", "images", "video", "mixed"}
    assert all(one.max_difference <= 1e-4 * one.max_logit for one in report.inputs)


def test_deepstack_is_refused_where_a_server_passes_embeddings_only(
    make_model: Callable[..., Any], tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", ALL_ATTENTION_FUNCTIONS["sdpa"])
    directory = _export(_composed((0,)), make_model, tokenizer_directory, tmp_path / "mindvl")
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    config.text_config._attn_implementation_internal = "vllm"
    with pytest.raises(ValueError, match="deepstack_visual_indexes: not supported"):
        AutoModel.from_config(config, trust_remote_code=True)


def test_the_processor_with_the_encoder_of_qwen3_vl_writes_the_times_of_a_video(
    make_model: Callable[..., Any], tokenizer_directory: Path, tmp_path: Path
) -> None:
    directory = _export(_composed(()), make_model, tokenizer_directory, tmp_path / "mindvl")
    processor = AutoProcessor.from_pretrained(directory, trust_remote_code=True)
    published = Qwen3VLProcessor(processor.image_processor, processor.tokenizer, processor.video_processor)
    inputs: dict[str, Any] = {
        "text": "<|vision_start|><|video_pad|><|vision_end|>?",
        "videos": [np.zeros((9, 64, 96, 3), np.uint8)],
        "video_metadata": [VideoMetadata(total_num_frames=9, fps=3.0)],
        "return_tensors": "pt",
    }
    found = processor(**inputs)
    assert "seconds>" in processor.tokenizer.decode(found["input_ids"][0])
    assert torch.equal(found["input_ids"], published(**inputs)["input_ids"])
