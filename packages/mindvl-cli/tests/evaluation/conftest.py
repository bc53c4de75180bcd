# SPDX-License-Identifier: Apache-2.0
"""A tiny random vision-language model in a directory with its own processor code, and a benchmark of coloured images."""

import json

import pytest

PROCESSOR_CODE = """
from transformers import ProcessorMixin


class TinyProcessor(ProcessorMixin):
    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token = "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs, image_idx, **kwargs):
        patches = int(image_inputs["image_grid_thw"][image_idx].prod())
        return self.image_token * (patches // self.image_processor.merge_size**2)
"""


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    import torch
    from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from mindvl_cli.demo.tokenizer import train_tokenizer

    directory = tmp_path_factory.mktemp("model")
    text = AutoTokenizer.from_pretrained(train_tokenizer(["read the number 0123456789"], directory, vocab_size=300))
    text.save_pretrained(directory)
    ids = {
        name: text.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("vision_start", "vision_end", "image_pad", "video_pad")
    }
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(text), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
            "bos_token_id": None, "eos_token_id": text.eos_token_id, "pad_token_id": text.pad_token_id,
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
            "fullatt_block_indexes": [1], "window_size": 112,
        },
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"], vision_end_token_id=ids["vision_end"],
    )  # fmt: skip
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(directory)
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * 784, "longest_edge": 16 * 784})
    images.save_pretrained(directory)
    (directory / "processing_tiny.py").write_text(PROCESSOR_CODE)
    stored = {
        "processor_class": "TinyProcessor",
        "auto_map": {"AutoProcessor": "processing_tiny.TinyProcessor"},
        "image_processor": json.loads(images.to_json_string()),
    }
    (directory / "processor_config.json").write_text(json.dumps(stored))
    (directory / "preprocessor_config.json").unlink()
    return directory


@pytest.fixture
def benchmark_file(tmp_path):
    """Nine questions: none, one or two images, exact, point and box."""
    from PIL import Image

    rows = []
    sizes = [(60, 40), (200, 90), (30, 160)]
    for number, (width, height) in enumerate(sizes):
        Image.new("RGB", (width, height), (40 * number, 90, 200)).save(tmp_path / f"{number}.png")
        rows += [
            {
                "id": f"read{number}",
                "task": "read",
                "images": [f"{number}.png"],
                "question": "<image>\nread",
                "answer": "1",
            },
            {"id": f"text{number}", "task": "text", "question": f"{number} + 1", "answer": str(number + 1)},
        ]
    box = {"images": ["0.png"], "question": "<image>\nwhere", "answer": "", "box": [10, 10, 30, 30]}
    rows += [
        {"id": "point", "task": "locate", "score": "point", **box},
        {"id": "box", "task": "locate", "score": "box", **box},
        {
            "id": "two",
            "task": "compare",
            "images": ["0.png", "1.png"],
            "question": "A <image> B <image>",
            "answer": "A",
        },
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path
