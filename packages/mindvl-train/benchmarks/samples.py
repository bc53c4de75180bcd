# SPDX-License-Identifier: Apache-2.0
"""Shards whose samples have given numbers of tokens and visual tokens, a byte-level tokenizer, models of three sizes.

Used by step.py.
"""

import io
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from mindvl_data import DataConfig, ImageConfig, PackingConfig, SourceConfig, index_directory, write_shards
from mindvl_model import VisionConfig
from mindvl_model.families.qwen2 import Qwen2Preset
from mindvl_model.testing.tokenizer import save_tokenizer
from mindvl_train import CheckpointConfig, MetricsConfig, ModelSection, RunConfig, ScheduleConfig

FRAME = len("?user\n??\n?assistant\n?\n")  # tokens of a sample beside image and answer: specials count one
PIXELS = 28  # sides of the square of one visual token

# hidden size, layers, heads, key-value heads, MLP of the language model; hidden size, layers, heads, MLP of the vision encoder;
# vocabulary; tokens of a pack; packs of a step
SIZES = {
    "5M": ((192, 6, 6, 2, 512), (128, 4, 4, 256), 4096, 512, 4),
    "20M": ((384, 6, 6, 2, 1024), (256, 4, 4, 512), 8192, 512, 4),
    "100M": ((768, 10, 12, 4, 2048), (384, 6, 6, 1024), 16384, 1024, 1),
}


def model_of(size: str) -> ModelSection:
    """A Qwen2.5-VL of the published kind, so that its rival is transformers' own class."""
    (hidden, layers, heads, kv_heads, ffn), (vision, vision_encoder, vision_heads, vision_ffn), vocabulary, _, _ = (
        SIZES[size]
    )
    head = hidden // heads
    return ModelSection(
        vision=VisionConfig(
            hidden_size=vision,
            num_layers=vision_encoder,
            num_heads=vision_heads,
            ffn_hidden_size=vision_ffn,
            full_attention_layers=(vision_encoder - 1,),
        ),
        language=Qwen2Preset(
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head,
            mrope_sections=(head // 8, 3 * head // 16, 3 * head // 16),
            ffn_hidden_size=ffn,
            vocab_size=vocabulary,
            tie_embeddings=False,
            rotary_base=1e6,
            max_positions=32768,
        ).decoder(),
    )


def run_of(directory: Path, size: str, steps: int, *, seq_length: int, global_batch_size: int) -> RunConfig:
    """A run over the samples that write_samples left in `directory`."""
    return RunConfig(
        phase="sft",
        out=directory / "run",
        data=DataConfig(
            sources=(SourceConfig(name="samples", path=directory / "shards"),),
            tokenizer=directory / "tokenizer",
            packing=PackingConfig(seq_length=seq_length),
            image=ImageConfig(min_pixels=PIXELS**2, max_pixels=4096 * PIXELS**2),
        ),
        model=model_of(size),
        schedule=ScheduleConfig(steps=steps, peak_lr=1e-4),
        global_batch_size=global_batch_size,
        checkpoints=CheckpointConfig(every_steps=10**6),
        metrics=MetricsConfig(every_steps=5),
    )


def write_samples(directory: Path, tokens: Sequence[int], visual_tokens: Sequence[int], seed: int = 0) -> None:
    """One question about one image for each entry, or a text where there is no visual token; indexed."""
    choose, noise = random.Random(seed), np.random.default_rng(seed)
    raw = directory / "raw"
    raw.mkdir(parents=True)
    packs = []
    for number, (length, visual) in enumerate(zip(tokens, visual_tokens, strict=True)):
        high = math.isqrt(visual)
        wide = visual // high if high else 0
        image = high * wide + 2 if high else 0  # and the tokens that frame it
        answer = max(1, length - FRAME - image)
        pack = {
            "id": f"s{number}",
            "conversations": [
                {"from": "human", "value": "<image>?" if high else "?"},
                {"from": "gpt", "value": "".join(choose.choices("abcdefgh ", k=answer - 1)) + "."},
            ],
        }
        if high:
            small = noise.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(small).resize((wide * PIXELS, high * PIXELS), Image.Resampling.BICUBIC).save(file, "JPEG")
            (raw / f"{number}.jpg").write_bytes(file.getvalue())
            pack["image"] = f"{number}.jpg"
        packs.append(pack)
    (raw / "packs.json").write_text(json.dumps(packs))
    write_shards(raw / "packs.json", directory / "shards", format="llava")
    index_directory(directory / "shards")
    save_tokenizer(directory / "tokenizer")
