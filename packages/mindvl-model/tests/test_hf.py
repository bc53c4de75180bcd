# SPDX-License-Identifier: Apache-2.0
"""An exported directory in transformers gives the same logits and loss, generates text and does not need mindvl."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.video_utils import VideoMetadata

from mindvl_model import MindVLConfig, ModelError, WeightError
from mindvl_model.hf.directory_config import config_from_directory
from mindvl_model.hf.export import export_hf_directory
from mindvl_model.hf.inputs import hf_inputs
from mindvl_model.hf.load import load_hf_directory
from mindvl_model.hf.processor_files import ProcessorSettings, VideoSettings
from mindvl_model.parameters import named_tensors
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_llama, smallest_qwen3_moe

pytestmark = pytest.mark.slow

CONFIG = smallest_config(vocab_size=270)
VIDEO = VideoSettings(min_pixels=28 * 28, max_pixels=28 * 28 * 6, min_frames=2)
SETTINGS = ProcessorSettings(min_pixels=28 * 28, max_pixels=28 * 28 * 20, video=VIDEO)


FAMILIES = {
    "own head": CONFIG,
    "tied head": smallest_config(vocab_size=270, tie_embeddings=True),
    "qwen3_moe": smallest_qwen3_moe(vocab_size=270),
    "deepseek_v3": smallest_deepseek_v3(vocab_size=270),
    "llama": smallest_llama(vocab_size=270, attention_bias=True, mlp_bias=True),
}


@pytest.fixture(scope="module", params=FAMILIES)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer_directory: Path
) -> tuple[MindVLConfig, Any, Path]:
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_model.model import MindVLModel
    from mindvl_model.testing.tiny import randomize

    config = FAMILIES[request.param]
    model = MindVLModel(config, BuildConfig())
    randomize(model)
    directory = tmp_path_factory.mktemp("export") / "model"
    export_hf_directory(model, config, directory, tokenizer=tokenizer_directory, processor=SETTINGS)
    return config, model, directory


@pytest.fixture
def hf_model(exported: tuple[MindVLConfig, Any, Path]) -> Any:
    return AutoModelForImageTextToText.from_pretrained(exported[2], trust_remote_code=True).eval()


def read_images(processor: Any, texts: list[str], images: list[Image.Image]) -> Any:
    return processor(text=texts, images=images, return_tensors="pt", padding=True)


def random_image(height: int, width: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def video(frames: int, height: int, width: int, seed: int) -> tuple[Any, VideoMetadata]:
    shape = (frames, 3, height, width)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return torch.from_numpy(pixels), VideoMetadata(total_num_frames=frames, fps=2.0, duration=frames / 2)


PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
SHOWN = "<|vision_start|><|video_pad|><|vision_end|>"
PADS = [5, 6]  # a model with random weights might generate them, and the next forward would lack their image


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The most likely next token of one sequence, never a placeholder."""
    return logits[0, -1].index_fill(0, torch.tensor(PADS), -torch.inf).argmax()


@torch.no_grad()
def test_logits_and_loss_equal_those_of_mindvl_model(exported: tuple[MindVLConfig, Any, Path], hf_model: Any) -> None:
    config, model, _ = exported
    segments = [
        random_segment(config, [(1, 6, 4), (1, 2, 10), (1, 8, 8)], seed=1),
        random_segment(config, num_text=12, seed=2),
        random_segment(config, [(1, 4, 4)], seed=3, videos=[(3, 4, 6), (1, 2, 8)]),
        random_segment(config, seed=4, videos=[(2, 6, 4)]),
    ]
    pack = pack_segments(segments, padding=4)
    logits = model.logits(**pack)[:-4].split([len(segment.input_ids) for segment in segments])
    loss_sum = torch.zeros(())
    for actual, segment in zip(logits, segments, strict=True):
        # transformers shifts labels itself, so the labels move back by one; the label of the last token is dropped.
        labels = torch.cat((torch.tensor([-100]), segment.labels[:-1]))
        output = hf_model(**hf_inputs(segment, config), labels=labels[None])
        assert (actual - output.logits[0]).abs().max() <= 1e-4
        segment.labels[-1] = -100
        loss_sum = loss_sum + output.loss * (segment.labels != -100).sum()
    torch.testing.assert_close(model(**pack_segments(segments)), loss_sum, rtol=1e-5, atol=0)


def test_config_and_weights_come_back_exactly(
    exported: tuple[MindVLConfig, Any, Path], make_model: Callable[..., Any], tokenizer_directory: Path, tmp_path: Path
) -> None:
    config, model, directory = exported
    assert config_from_directory(directory) == config
    other = make_model(config, seed=9)
    load_hf_directory(other, config, directory)
    assert_same(other, model)
    export_hf_directory(other, config, tmp_path / "again", tokenizer=tokenizer_directory, processor=SETTINGS)
    for file in directory.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_a_directory_saved_by_transformers_can_be_read(
    exported: tuple[MindVLConfig, Any, Path],
    hf_model: Any,
    make_model: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, model, _ = exported
    hf_model.save_pretrained(tmp_path)
    language = config.language
    if language.num_mtp_layers:  # transformers drops the layers of multi-token prediction
        assert language.num_mtp_layers == 1
        with pytest.raises(WeightError, match="saved without multi-token prediction"):
            load_hf_directory(make_model(config), config, tmp_path)
        config = replace(config, language=replace(language, num_mtp_layers=0))
    assert config_from_directory(tmp_path) == config
    assert ("loaded without them" in caplog.text) == (language.family == "deepseek_v3")
    other = make_model(config, seed=9)
    load_hf_directory(other, config, tmp_path)
    assert_same(other, model)


def assert_same(actual: Any, expected: Any) -> None:
    """Check that all parameters and routing biases of two models are bitwise equal."""
    held = named_tensors(expected)
    for name, tensor in named_tensors(actual).items():
        assert torch.equal(tensor, held[name]), name


def test_the_processor_puts_in_as_many_placeholders_as_visual_tokens(exported: Any, hf_model: Any) -> None:
    processor = AutoProcessor.from_pretrained(exported[2], trust_remote_code=True)
    inputs = read_images(processor, [f"one {PLACE} two {PLACE}"], [random_image(56, 84, 0), random_image(30, 60, 1)])
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 4]]
    assert int((inputs["input_ids"] == CONFIG.tokens.image).sum()) == 6 + 2
    assert hf_model(**inputs).logits.shape[-1] == CONFIG.language.vocab_size
    largest = read_images(processor, [PLACE], [random_image(560, 560, 2)])
    assert int(largest["image_grid_thw"].prod()) <= 20 * 4
    with pytest.raises(ValueError, match="image placeholders for 8 visual tokens"):
        hf_model(**(inputs | {"input_ids": inputs["input_ids"][:, :6]}))


@torch.no_grad()
def test_generation_with_cache_and_padding_is_what_full_forwards_give(exported: Any, hf_model: Any) -> None:
    processor = AutoProcessor.from_pretrained(exported[2], trust_remote_code=True)
    processor.tokenizer.padding_side = "left"
    asked = [(f"a longer question about {PLACE}?", random_image(56, 84, 0)), (f"{PLACE}?", random_image(84, 56, 1))]
    greedy = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "suppress_tokens": PADS}
    alone = []
    for text, image in asked:
        inputs = read_images(processor, [text], [image])
        answer = hf_model.generate(**inputs, **greedy)[0, inputs["input_ids"].shape[1] :]
        ids = inputs["input_ids"]
        for token in answer:  # no cache, no generate: one whole forward per token
            logits = hf_model(ids, pixel_values=inputs["pixel_values"], image_grid_thw=inputs["image_grid_thw"]).logits
            assert token == likeliest(logits)
            ids = torch.cat((ids, token.view(1, 1)), dim=1)
        alone.append(answer)
    both = read_images(processor, [text for text, _ in asked], [image for _, image in asked])
    answers = hf_model.generate(**both, **greedy)[:, both["input_ids"].shape[1] :]
    assert answers.tolist() == [answer.tolist() for answer in alone]


@torch.no_grad()
def test_videos_and_images_together_generate_what_full_forwards_give(exported: Any, hf_model: Any) -> None:
    processor = AutoProcessor.from_pretrained(exported[2], trust_remote_code=True)
    processor.tokenizer.padding_side = "left"
    asked = [
        (
            f"{SHOWN} after {PLACE} and {PLACE}?",
            [random_image(56, 84, 0), random_image(28, 56, 1)],
            [video(6, 56, 56, 2)],
        ),
        (f"which? {SHOWN}{SHOWN}", [], [video(4, 56, 84, 3), video(5, 28, 56, 4)]),
        ("text alone, and rather long so that the others are padded in front of it, as far as needed", [], []),
    ]
    greedy = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "suppress_tokens": PADS}

    def read(items: list[Any]) -> Any:
        texts = [text for text, _, _ in items]
        images = [one for _, those, _ in items for one in those]
        videos = [one for _, _, those in items for one in those]
        options: dict[str, Any] = {"images": images} if images else {}
        if videos:
            options |= {"videos": [pixels for pixels, _ in videos], "video_metadata": [each for _, each in videos]}
        return processor(text=texts, return_tensors="pt", padding=True, **options)

    alone = []
    for item in asked:
        inputs = read([item])
        media = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
        answer = hf_model.generate(**inputs, **greedy)[0, inputs["input_ids"].shape[1] :]
        ids = inputs["input_ids"]
        for token in answer:
            assert token == likeliest(hf_model(ids, **media).logits)
            ids = torch.cat((ids, token.view(1, 1)), dim=1)
        alone.append(answer.tolist())
    together = read(asked)
    # frames: 6 as they are; 4; 5 made 4. Patches: a pair of frames each, 56 x 56 pixels are 4 x 4.
    assert together["video_grid_thw"].tolist() == [[3, 4, 4], [2, 4, 6], [2, 2, 4]]
    answers = hf_model.generate(**together, **greedy)[:, together["input_ids"].shape[1] :]
    assert answers.tolist() == alone
    thrice = hf_model.generate(**together, **greedy | {"do_sample": True, "top_k": 1, "num_return_sequences": 3})
    assert thrice[:, together["input_ids"].shape[1] :].tolist() == [answer for answer in alone for _ in range(3)]


@torch.no_grad()
def test_several_sequences_for_one_prompt_use_its_images(exported: Any, hf_model: Any) -> None:
    processor = AutoProcessor.from_pretrained(exported[2], trust_remote_code=True)
    inputs = read_images(processor, [f"{PLACE} and {PLACE}?"], [random_image(56, 84, 0), random_image(84, 56, 1)])
    common = {"max_new_tokens": 4, "eos_token_id": None, "suppress_tokens": PADS}
    one = hf_model.generate(**inputs, **common, do_sample=False)
    three = hf_model.generate(**inputs, **common, do_sample=True, top_k=1, num_return_sequences=3)
    assert three.tolist() == one.tolist() * 3
    text = processor(text=["no image"], return_tensors="pt")
    assert hf_model.generate(**text, **common, do_sample=False).shape[1] == text["input_ids"].shape[1] + 4


CLEAN = """
    import sys
    sys.path.append({packages!r})
    import torch
    from PIL import Image
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
    directory, trust = {directory!r}, {{"trust_remote_code": True}}
    assert AutoConfig.from_pretrained(directory, **trust).model_type == "mindvl"
    model = AutoModelForImageTextToText.from_pretrained(directory, **trust).eval()
    processor = AutoProcessor.from_pretrained(directory, **trust)
    processor.tokenizer.padding_side = "left"
    marks = "<|vision_start|><|{{}}_pad|><|vision_end|>"
    asked = {{"text": [marks.format("image"), "what is it? " + marks.format("{kind}")], "images": {images}}}
    if "{kind}" == "video":
        asked |= {{"videos": [torch.arange(4 * 3 * 56 * 56).view(4, 3, 56, 56).byte()], "do_sample_frames": False}}
    inputs = processor(**asked, return_tensors="pt", padding=True)
    answers = model.generate(**inputs, max_new_tokens=3, eos_token_id=None)
    assert answers.shape == (2, inputs["input_ids"].shape[1] + 3)
    torch.save(model(**torch.load({inputs!r})).logits, {logits!r})
    hidden = ("mindvl_model", "mindvl_ops", "mindvl_data", "megatron", {hidden!r})
    assert not [name for name in sys.modules if name.split(".")[0] in hidden]
"""


@pytest.mark.parametrize(
    ("exported", "hidden"),
    [("own head", "nothing else"), ("qwen3_moe", "torchvision"), ("deepseek_v3", "nothing else")],
    indirect=["exported"],
)
def test_the_directory_works_where_mindvl_is_not_installed(
    exported: tuple[MindVLConfig, Any, Path], tmp_path: Path, hidden: str
) -> None:
    """An interpreter without site-packages gets a directory of links to them, except mindvl and `hidden`."""
    config, model, directory = exported
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(torch.__file__).parent.parent.iterdir():
        if not entry.name.startswith(("mindvl", "_mindvl", "__editable__", "megatron", hidden)):
            (packages / entry.name).symlink_to(entry)
    videos = [] if hidden == "torchvision" else [(2, 4, 2)]
    segment = random_segment(config, [(1, 4, 6)], seed=4, videos=videos)
    torch.save(hf_inputs(segment, config), tmp_path / "inputs.pt")
    new_image = "Image.new('RGB', (84, 56), (200, 30, 90))"
    code = CLEAN.format(
        packages=str(packages),
        directory=str(directory),
        kind="video" if videos else "image",
        images=f"[{new_image}]" if videos else f"[{new_image}] * 2",
        inputs=str(tmp_path / "inputs.pt"),
        logits=str(tmp_path / "logits.pt"),
        hidden=hidden,
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-S", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    hf_logits = torch.load(tmp_path / "logits.pt")[0]
    assert (model.logits(**pack_segments([segment])) - hf_logits).abs().max() <= 1e-4


def test_weights_are_written_in_the_type_that_is_asked_for_but_routing_biases(
    make_model: Callable[..., Any], tokenizer_directory: Path, tmp_path: Path
) -> None:
    config = FAMILIES["deepseek_v3"]
    model, directory = make_model(config), tmp_path / "model"
    export_hf_directory(
        model, config, directory, tokenizer=tokenizer_directory, processor=SETTINGS, dtype=torch.bfloat16
    )
    loaded = AutoModelForImageTextToText.from_pretrained(directory, trust_remote_code=True)
    assert loaded.dtype == torch.bfloat16
    expected = model.language.decoder.final_layernorm.weight.bfloat16()
    assert torch.equal(loaded.model.language_model.norm.weight, expected)
    bias = model.language.decoder.layers[1].mlp.router.expert_bias
    assert torch.equal(loaded.model.language_model.layers[1].mlp.gate.e_score_correction_bias, bias)


def test_layers_of_multi_token_prediction_stay_in_the_directory_and_are_no_news_to_transformers(
    make_model: Callable[..., Any], tokenizer_directory: Path, tmp_path: Path
) -> None:
    config = smallest_deepseek_v3(vocab_size=270, num_mtp_layers=2)
    model, directory = make_model(config), tmp_path / "model"
    export_hf_directory(model, config, directory, tokenizer=tokenizer_directory, processor=SETTINGS)
    stored = load_file(directory / "model.safetensors")
    for layer, depth in ((3, 0), (4, 1)):
        prefix = f"model.language_model.layers.{layer}."
        mtp_layer = model.language.mtp.layers[depth]
        assert torch.equal(stored[prefix + "eh_proj.weight"], mtp_layer.eh_proj.weight)
        assert torch.equal(stored[prefix + "embed_tokens.weight"], model.language.embedding.word_embeddings.weight)
        assert torch.equal(stored[prefix + "shared_head.head.weight"], model.language.output_layer.weight)
    load: Any = AutoModelForImageTextToText.from_pretrained
    _, report = load(directory, trust_remote_code=True, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    other = make_model(config, seed=9)
    load_hf_directory(other, config_from_directory(directory), directory)
    assert_same(other, model)


def test_a_failed_export_leaves_no_directory_of_that_name(
    make_model: Callable[..., Any], tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindvl_model.hf import export

    def full_disk(*_: object) -> None:
        raise OSError("No space left on device")

    model, out = make_model(CONFIG), tmp_path / "model"
    with monkeypatch.context() as patched:
        patched.setattr(export, "write_mindvl_processor", full_disk)
        with pytest.raises(ModelError, match=r"cannot be written \(No space left"):
            export_hf_directory(model, CONFIG, out, tokenizer=tokenizer_directory, processor=SETTINGS)
    assert not out.exists()
    export_hf_directory(
        model, CONFIG, out, tokenizer=tokenizer_directory, processor=SETTINGS
    )  # over what the failure left
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(ModelError, match="already exists"):
        export_hf_directory(model, CONFIG, out, tokenizer=tokenizer_directory, processor=SETTINGS)


def test_remote_code_does_not_import_mindvl() -> None:
    import mindvl_model.hf.export as export

    for name in export.REMOTE_CODE:
        text = Path(export.__file__).with_name(name).read_text()
        assert "import mindvl" not in text
        assert "from mindvl" not in text


def test_config_json_holds_only_plain_values(exported: Any) -> None:
    stored = json.loads((exported[2] / "config.json").read_text())
    assert stored["model_type"] == "mindvl"
    assert stored["vision_config"]["fullatt_block_indexes"] == [1]
