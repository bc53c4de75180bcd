# SPDX-License-Identifier: Apache-2.0
"""vLLM generates the tokens of transformers for exported directories; `nox -s vllm` installs vLLM for this file."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from mindvl_model.config import MindVLConfig
from mindvl_model.families.qwen3 import Qwen3Preset
from mindvl_model.hf.export import export_hf_directory
from mindvl_model.hf.processor_files import ProcessorSettings
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen3_moe

pytest.importorskip("vllm", reason="vLLM is not installed; run nox -s vllm")

NEW_TOKENS = 24
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PROMPTS = [("hello", 0), (f"{IMAGE}?", 1), (f"a{IMAGE}b{IMAGE}c", 2)]  # with the number of images
# The kernels of vLLM need these sizes; its latent attention on CPU supports those of DeepSeek-V3 only.
SHARED = {"vocab_size": 270, "hidden_size": 64, "max_positions": 2048, "ffn_hidden_size": 64}
EXPERTS = {**SHARED, "expert_ffn_hidden_size": 32}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 512, "nope_head_dim": 32, "rope_head_dim": 64, "value_head_dim": 32}
# In a process of its own, because vLLM replaces parts of transformers for the whole process.
GENERATE = f"""
import json, sys
from PIL import Image
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, implementation, prompts, *images = sys.argv[1:]
    images = [Image.open(path) for path in images]
    engine = LLM(
        model, model_impl=implementation, trust_remote_code=implementation == "transformers", dtype="float32",
        enforce_eager=True, max_model_len=1024, max_num_seqs=4, limit_mm_per_prompt={{"image": 2, "video": 0}},
    )
    requests = [
        {{"prompt": text, **({{"multi_modal_data": {{"image": images[:number]}}}} if number else {{}})}}
        for text, number in json.loads(prompts)
    ]
    outputs = engine.generate(
        requests, SamplingParams(temperature=0, max_tokens={NEW_TOKENS}, logprobs=1, ignore_eos=True)
    )
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    print("RESULT", json.dumps({{
        "module": type(runner.model).__module__,
        "answers": [
            [list(output.prompt_token_ids), list(output.outputs[0].token_ids), output.outputs[0].cumulative_logprob]
            for output in outputs
        ],
    }}))
"""


def _config(kind: str) -> MindVLConfig:
    if kind == "qwen3":
        sizes: dict[str, Any] = {
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 32,
            "rotary_base": 1e4,
            "init_std": 0.1,
        }
        config = replace(smallest_config(), language=Qwen3Preset(**sizes, **SHARED).decoder())
    elif kind == "qwen3_moe":
        config = smallest_qwen3_moe(**EXPERTS, head_dim=32)
    else:
        config = smallest_deepseek_v3(**EXPERTS, **LATENT)
    return replace(config, vision=replace(config.vision, hidden_size=64, ffn_hidden_size=96))


@torch.no_grad()
def _expected(directory: Path, images: list[Image.Image]) -> list[list[Any]]:
    """Prompt tokens, answer tokens and the sum of their log probabilities, from transformers."""
    model = AutoModelForImageTextToText.from_pretrained(directory, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(directory, trust_remote_code=True)
    answers = []
    for text, number in PROMPTS:
        inputs = processor(text=text, images=images[:number] or None, return_tensors="pt")
        length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "eos_token_id": None}
        found = model.generate(**inputs, **length, do_sample=False, return_dict_in_generate=True, output_logits=True)
        answer = found.sequences[0, -NEW_TOKENS:].tolist()
        steps = zip(found.logits, answer, strict=True)
        logprob = sum(float(torch.log_softmax(logits[0], -1)[token]) for logits, token in steps)
        answers.append([inputs["input_ids"][0].tolist(), answer, logprob])
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_vllm_generates_the_tokens_of_transformers(
    kind: str, make_model: Callable[..., Any], tokenizer_directory: Path, tmp_path: Path
) -> None:
    config, directory = _config(kind), tmp_path / "mindvl"
    settings = ProcessorSettings(min_pixels=784, max_pixels=78400)
    export_hf_directory(make_model(config), config, directory, tokenizer=tokenizer_directory, processor=settings)
    noise = np.random.default_rng(0)
    images = [Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((56, 84), (140, 112))]
    paths = [tmp_path / f"{number}.png" for number in range(len(images))]
    for image, path in zip(images, paths, strict=True):
        image.save(path)
    expected = _expected(directory, images)
    script = tmp_path / "generate.py"
    script.write_text(GENERATE)
    for implementation, module in (("auto", "mindvl_model.hf.vllm_model"), ("transformers", "vllm.")):
        done = subprocess.run(
            [sys.executable, script, directory, implementation, json.dumps(PROMPTS), *paths],
            env=os.environ
            | {
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, done.stdout[-2000:] + done.stderr[-4000:]
        result = json.loads(lines[0].removeprefix("RESULT "))
        assert result["module"].startswith(module)
        for found, wanted in zip(result["answers"], expected, strict=True):
            assert found[:2] == wanted[:2], (implementation, wanted[0])
            assert found[2] == pytest.approx(wanted[2], abs=1e-3)
