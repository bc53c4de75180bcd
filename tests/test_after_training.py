# SPDX-License-Identifier: Apache-2.0
"""After training, as a new user: merge two transformers directories, evaluate, search the resolution, use the result.

The models are Qwen2.5-VL directories with tiny random weights, and the benchmarks are small files in the layouts of VLMEvalKit
and lmms-eval. What random models answer does not matter: every stage is compared with transformers or with another stage.
"""

import base64
import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file

from mindvl_cli.demo.tokenizer import train_tokenizer
from mindvl_cli.main import cli
from mindvl_model.hf.processor_files import ProcessorSettings, write_published_processor

pytestmark = pytest.mark.slow

GRID = "4,16x16,64"  # minimums x maximums, in visual tokens of 28 x 28 pixels
SIZES = ((40, 60), (120, 200), (300, 340))  # height and width: below, inside of and above the limits of the grid


def run(*words: str | Path) -> dict[str, Any]:
    """The JSON document of a command."""
    done = CliRunner().invoke(cli, [*map(str, words), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two directories as published models are laid out, with weights of two seeds."""
    from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from mindvl_model import VisionConfig

    vision = VisionConfig(hidden_size=32, num_layers=2, num_heads=2, ffn_hidden_size=48, full_attention_layers=(1,))

    place = tmp_path_factory.mktemp("models")
    texts = ["Answer the question using a single word.", "yes no A B C D 0123456789", "What is in the image?"]
    tokenizer = train_tokenizer(texts, place / "tokenizer", vocab_size=400)
    words = AutoTokenizer.from_pretrained(tokenizer)
    ids: dict[str, Any] = {
        name: words.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start")
    }
    paths = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(words), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
                "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "bos_token_id": None,
                "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id,
            },
            vision_config={
                "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
                "fullatt_block_indexes": [1], "window_size": 112,
            },
            image_token_id=ids["image_pad"], video_token_id=ids["video_pad"], vision_start_token_id=ids["vision_start"],
        )  # fmt: skip
        path = place / f"seed-{seed}"
        model: Any = Qwen2_5_VLForConditionalGeneration(config)
        model.to(torch.bfloat16).save_pretrained(path)
        limits = ProcessorSettings(min_pixels=4 * 784, max_pixels=1280 * 784)
        write_published_processor(path, tokenizer, limits, vision)
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small file for each of several benchmarks of the paper."""
    import pyarrow
    from pyarrow import parquet

    place, noise = tmp_path_factory.mktemp("benchmarks"), np.random.default_rng(0)
    files = []
    for height, width in SIZES:
        file = io.BytesIO()
        Image.fromarray(noise.integers(0, 256, (height, width, 3), np.uint8)).save(file, "PNG")
        files.append(file.getvalue())
    images = [base64.b64encode(file).decode() for file in files]
    rows: dict[str, list[dict[str, Any]]] = {
        "OCRBench": [{"question": "what is written?", "answer": "['one', '1']", "category": "Regular Text Recognition"}] * 3,
        "DocVQA_VAL": [{"question": "what is the date?", "answer": "['1 May 1990', '1990']"}] * 3,
        "MME": [
            {"question": f"Is it {word}? Please answer yes or no.", "answer": answer, "category": "existence",
             "image_path": "a.png"}
            for word, answer in (("red", "Yes"), ("blue", "No"))
        ],
        "MMBench_DEV_EN_V11": [
            {"question": "which?", "A": "a cat", "B": "a dog", "answer": "A", "category": "object_localization",
             "l2-category": "finegrained_perception", "split": "dev"}
        ] * 2,
        "HallusionBench": [
            {"question": f"Is it {word}?", "answer": answer, "category": "VD", "l2-category": "chart",
             "set_id": "0", "figure_id": figure, "question_id": "0"}
            for figure, (word, answer) in enumerate((("red", "Yes"), ("blue", "No")))
        ],
        "AI2D_TEST": [{"question": "which?", "A": "a", "B": "b", "C": "c", "D": "d", "answer": "D"}] * 2,
    }  # fmt: skip
    for name, given in rows.items():
        with open(place / f"{name}.tsv", "w", encoding="utf-8", newline="") as stream:
            table = csv.DictWriter(stream, ["index", "image", *given[0]], delimiter="\t")
            table.writeheader()
            for index, row in enumerate(given):
                table.writerow({"index": index, "image": images[index % len(images)], **row})
    charts = [
        {"question": "how many?", "answer": "7", "type": "human_test", "image": {"bytes": file, "path": None}}
        for file in files
    ]
    (place / "ChartQA").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(charts), place / "ChartQA" / "test-00000-of-00001.parquet")
    exam = [{"id": "1", "question": "1 + 1 = ?", "answer": "002", "metric": "aime"}]
    (place / "AIME2024.jsonl").write_text("".join(json.dumps(row) + "\n" for row in exam))
    return place


def test_two_models_are_merged_evaluated_searched_and_used(
    models: list[Path], benchmarks: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    merged = tmp_path / "merged"
    document = run("merge", *models, "--out", merged)
    assert (document["num_copied"], document["unused"]) == (0, [])
    one, two, mean = (load_file(path / "model.safetensors") for path in (*models, merged))
    for name, values in mean.items():
        assert torch.equal(values, ((one[name].float() + two[name].float()) / 2).bfloat16()), name

    answering = ("--device", "cpu", "--max-new-tokens", "4")
    scores = run("eval", merged, "--benchmark", benchmarks, "--out", tmp_path / "scores", *answering)
    names = {"OCRBench", "DocVQA_VAL", "MME", "MMBench_DEV_EN_V11", "HallusionBench", "AI2D_TEST", "AIME2024"}
    assert scores["by_benchmark"].keys() == names | {"ChartQA_test"}
    assert (scores["min_pixels"], scores["max_pixels"]) == (4 * 784, 1280 * 784)
    assert scores["metrics"]["HallusionBench"].keys() >= {"aAcc", "fAcc", "qAcc"}
    pages = {path.stem for path in (tmp_path / "scores").glob("*.html")}
    assert pages >= names

    limited = tmp_path / "limited"
    search = ("search-resolution", merged, "--benchmark", benchmarks, "--grid", GRID, "--out", tmp_path / "search")
    found = run(*search, "--copy-to", limited, *answering)
    assert [(cell["min_pixels"] // 784, cell["max_pixels"] // 784) for cell in found["cells"]] == [
        (4, 16), (4, 64), (16, 16), (16, 64)
    ]  # fmt: skip
    chosen = {"min_pixels": found["chosen"]["min_pixels"], "max_pixels": found["chosen"]["max_pixels"]}
    assert found["chosen"]["score"] == max(cell["score"] for cell in found["cells"])

    processor = AutoProcessor.from_pretrained(limited)
    model = AutoModelForImageTextToText.from_pretrained(limited)
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}],
        add_generation_prompt=True,
    )
    for height, width in SIZES:
        inputs = processor(text=[text], images=[Image.new("RGB", (width, height))], return_tensors="pt")
        (_, rows, columns), *_ = inputs["image_grid_thw"].tolist()
        area = 14 * 14 * rows * columns
        assert chosen["min_pixels"] <= area <= chosen["max_pixels"]
        assert model(**inputs).logits.shape[1] == inputs["input_ids"].shape[1]
    as_is = run("eval", limited, "--benchmark", benchmarks, *answering)
    given = run("eval", merged, "--benchmark", benchmarks, "--min-pixels", str(chosen["min_pixels"]),
                "--max-pixels", str(chosen["max_pixels"]), *answering)  # fmt: skip
    del as_is["model"], given["model"]
    assert as_is == given
