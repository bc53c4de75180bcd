# SPDX-License-Identifier: Apache-2.0
"""The exported folder in plain transformers: same logits, same loss, generation, and no need of mindvl."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from mindvl_model import MindVLConfig, ModelError
from mindvl_model.hf.export import export_hf_folder
from mindvl_model.hf.folder_config import config_from_folder
from mindvl_model.hf.load import load_hf_folder
from mindvl_model.hf.processor_files import ProcessorSettings
from mindvl_model.testing.rows import RandomSegment, normalized_pixels, pack, random_segment
from mindvl_model.testing.tiny import smallest_config

CONFIG = smallest_config(vocab_size=270)
SETTINGS = ProcessorSettings(min_pixels=28 * 28, max_pixels=28 * 28 * 20)


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path
) -> tuple[MindVLConfig, Any, Path]:
    from mindvl_model.megatron.blocks import Layout
    from mindvl_model.model import MindVLModel
    from mindvl_model.testing.tiny import randomize

    config = smallest_config(vocab_size=270, tie_embeddings=request.param)
    model = MindVLModel(config, Layout())
    randomize(model)
    folder = tmp_path_factory.mktemp("export") / "model"
    export_hf_folder(model, config, folder, tokenizer=tokenizer_folder, processor=SETTINGS)
    return config, model, folder


@pytest.fixture
def twin(exported: tuple[MindVLConfig, Any, Path]) -> Any:
    return AutoModelForImageTextToText.from_pretrained(exported[2], trust_remote_code=True).eval()


def twin_inputs(segment: RandomSegment, config: MindVLConfig) -> dict[str, Any]:
    pictures = {
        "pixel_values": normalized_pixels(segment.pixel_values, config.vision),
        "image_grid_thw": segment.image_grid_thw,
    }
    return {"input_ids": segment.input_ids[None]} | (pictures if len(segment.image_grid_thw) else {})


def read_pictures(processor: Any, texts: list[str], pictures: list[Image.Image]) -> Any:
    return processor(text=texts, images=pictures, return_tensors="pt", padding=True)


def picture(height: int, width: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


PLACE = "<|vision_start|><|image_pad|><|vision_end|>"


def test_logits_and_loss_are_those_of_our_model(exported: tuple[MindVLConfig, Any, Path], twin: Any) -> None:
    config, model, _ = exported
    segments = [
        random_segment(config, [(1, 6, 4), (1, 2, 10), (1, 8, 8)], seed=1),
        random_segment(config, num_text=12, seed=2),
        random_segment(config, [(1, 4, 4)], seed=3),
    ]
    row = pack(segments, padding=4)
    logits = model.logits(**row)[:-4].split([len(segment.input_ids) for segment in segments])
    loss_sum = torch.zeros(())
    for ours, segment in zip(logits, segments, strict=True):
        # Theirs shifts labels itself, so ours move back by one; what the last token would learn is not counted.
        labels = torch.cat((torch.tensor([-100]), segment.labels[:-1]))
        theirs = twin(**twin_inputs(segment, config), labels=labels[None])
        assert (ours - theirs.logits[0]).abs().max() <= 1e-4
        segment.labels[-1] = -100
        loss_sum = loss_sum + theirs.loss * (segment.labels != -100).sum()
    torch.testing.assert_close(model(**pack(segments)), loss_sum, rtol=1e-5, atol=0)


def test_config_and_weights_come_back_exactly(
    exported: tuple[MindVLConfig, Any, Path], make_model: Callable[..., Any], tokenizer_folder: Path, tmp_path: Path
) -> None:
    config, model, folder = exported
    assert config_from_folder(folder) == config
    other = make_model(config, seed=9)
    load_hf_folder(other, config, folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    export_hf_folder(other, config, tmp_path / "again", tokenizer=tokenizer_folder, processor=SETTINGS)
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_the_processor_puts_in_as_many_placeholders_as_visual_tokens(exported: Any, twin: Any) -> None:
    processor = AutoProcessor.from_pretrained(exported[2], trust_remote_code=True)
    inputs = read_pictures(processor, [f"one {PLACE} two {PLACE}"], [picture(56, 84, 0), picture(30, 60, 1)])
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 4]]
    assert int((inputs["input_ids"] == CONFIG.tokens.image).sum()) == 6 + 2
    assert twin(**inputs).logits.shape[-1] == CONFIG.language.vocab_size
    largest = read_pictures(processor, [PLACE], [picture(560, 560, 2)])
    assert int(largest["image_grid_thw"].prod()) <= 20 * 4
    with pytest.raises(ValueError, match="image placeholders in the text, but the images give 8 visual tokens"):
        twin(**(inputs | {"input_ids": inputs["input_ids"][:, :6]}))


@torch.no_grad()
def test_generation_with_cache_and_padding_is_what_full_forwards_give(exported: Any, twin: Any) -> None:
    processor = AutoProcessor.from_pretrained(exported[2], trust_remote_code=True)
    processor.tokenizer.padding_side = "left"
    asked = [(f"a longer question about {PLACE}?", picture(56, 84, 0)), (f"{PLACE}?", picture(84, 56, 1))]
    greedy = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    alone = []
    for text, image in asked:
        inputs = read_pictures(processor, [text], [image])
        answer = twin.generate(**inputs, **greedy)[0, inputs["input_ids"].shape[1] :]
        ids = inputs["input_ids"]
        for token in answer:  # no cache, no generate: one whole forward per token
            logits = twin(ids, pixel_values=inputs["pixel_values"], image_grid_thw=inputs["image_grid_thw"]).logits
            assert token == logits[0, -1].argmax()
            ids = torch.cat((ids, token.view(1, 1)), dim=1)
        alone.append(answer)
    both = read_pictures(processor, [text for text, _ in asked], [image for _, image in asked])
    answers = twin.generate(**both, **greedy)[:, both["input_ids"].shape[1] :]
    assert answers.tolist() == [answer.tolist() for answer in alone]


@torch.no_grad()
def test_several_answers_to_one_question_see_its_pictures_whole(exported: Any, twin: Any) -> None:
    processor = AutoProcessor.from_pretrained(exported[2], trust_remote_code=True)
    inputs = read_pictures(processor, [f"{PLACE} and {PLACE}?"], [picture(56, 84, 0), picture(84, 56, 1)])
    common = {"max_new_tokens": 4, "eos_token_id": None}
    one = twin.generate(**inputs, **common, do_sample=False)
    three = twin.generate(**inputs, **common, do_sample=True, top_k=1, num_return_sequences=3)
    assert three.tolist() == one.tolist() * 3
    text = processor(text=["no picture"], return_tensors="pt")
    assert twin.generate(**text, **common, do_sample=False).shape[1] == text["input_ids"].shape[1] + 4


def test_the_folder_works_where_mindvl_is_not_installed(
    make_model: Callable[..., Any], tokenizer_folder: Path, tmp_path: Path
) -> None:
    config, folder = CONFIG, tmp_path / "model"
    model = make_model(config)
    export_hf_folder(model, config, folder, tokenizer=tokenizer_folder, processor=SETTINGS)
    segment = random_segment(config, [(1, 4, 6)], seed=4)
    torch.save(twin_inputs(segment, config), tmp_path / "inputs.pt")
    code = f"""
        import sys
        class Hide:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {{"mindvl_model", "mindvl_ops", "mindvl_data", "megatron"}}:
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Hide())
        import torch
        from transformers import AutoModelForImageTextToText, AutoProcessor
        model = AutoModelForImageTextToText.from_pretrained({str(folder)!r}, trust_remote_code=True).eval()
        AutoProcessor.from_pretrained({str(folder)!r}, trust_remote_code=True)
        torch.save(model(**torch.load({str(tmp_path / "inputs.pt")!r})).logits, {str(tmp_path / "logits.pt")!r})
        assert not [name for name in sys.modules if name in ("mindvl_model", "megatron")]
    """
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    theirs = torch.load(tmp_path / "logits.pt")[0]
    assert (model.logits(**pack([segment])) - theirs).abs().max() <= 1e-4


def test_weights_are_written_in_the_type_that_is_asked_for(
    make_model: Callable[..., Any], tokenizer_folder: Path, tmp_path: Path
) -> None:
    model, folder = make_model(CONFIG), tmp_path / "model"
    export_hf_folder(model, CONFIG, folder, tokenizer=tokenizer_folder, processor=SETTINGS, dtype=torch.bfloat16)
    loaded = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
    assert loaded.dtype == torch.bfloat16
    expected = model.language.decoder.final_layernorm.weight.bfloat16()
    assert torch.equal(loaded.model.language_model.norm.weight, expected)


def test_a_failed_export_leaves_no_folder_of_that_name(
    make_model: Callable[..., Any], tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindvl_model.hf import export

    def full_disk(*_: object) -> None:
        raise OSError("No space left on device")

    model, out = make_model(CONFIG), tmp_path / "model"
    with monkeypatch.context() as patched:
        patched.setattr(export, "write_mindvl_processor", full_disk)
        with pytest.raises(OSError, match="No space left"):
            export_hf_folder(model, CONFIG, out, tokenizer=tokenizer_folder, processor=SETTINGS)
    assert not out.exists()
    export_hf_folder(model, CONFIG, out, tokenizer=tokenizer_folder, processor=SETTINGS)  # over what the failure left
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(ModelError, match="exists already"):
        export_hf_folder(model, CONFIG, out, tokenizer=tokenizer_folder, processor=SETTINGS)


def test_remote_code_imports_nothing_of_ours() -> None:
    import mindvl_model.hf.export as export

    for name in export.REMOTE_CODE:
        text = Path(export.__file__).with_name(name).read_text()
        assert "import mindvl" not in text
        assert "from mindvl" not in text


def test_config_json_holds_only_plain_values(exported: Any) -> None:
    stored = json.loads((exported[2] / "config.json").read_text())
    assert stored["model_type"] == "mindvl"
    assert stored["vision_config"]["fullatt_block_indexes"] == [1]
