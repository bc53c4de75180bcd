# SPDX-License-Identifier: Apache-2.0
"""Tests of `mindvl analyze routing`: a checkpoint with experts over packed sequences; refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from mindvl_cli.commands.analyze import analyze
from mindvl_cli.failures import CliError
from mindvl_cli.load import to_yaml
from mindvl_data import DataConfig, PackingConfig, SourceConfig, index_directory, write_shards
from mindvl_model import MindVLConfig, ModelError, set_up_device
from mindvl_model.testing.tiny import randomize, smallest_config, smallest_qwen3_moe
from mindvl_model.testing.tokenizer import save_tokenizer


def save(config: MindVLConfig, out: Path, tokenizer: Path) -> Path:
    """A run of that model with random weights; in fp32."""
    set_up_device()
    import torch

    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_model.megatron.process import single_process
    from mindvl_model.model import MindVLModel
    from mindvl_model.parameters import named_tensors
    from mindvl_train.checkpoints.directory import plain_json, save_weights
    from mindvl_train.megatron.tensor_files import stored_parameters, write_tensors

    with single_process():
        model = MindVLModel(config, BuildConfig())
        randomize(model)
        tensors = [(name, 0, tensor.detach()) for name, tensor in named_tensors(model).items()]
        places = stored_parameters(config, torch.float32)
        described = {
            "model": plain_json(config),
            "run": {"precision": "fp32", "data": {"tokenizer": str(tokenizer)}},
        }
        save_weights(
            out / "checkpoints", described, lambda directory: write_tensors(directory, places, tensors, 1 << 20)
        )
    return out


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes, shards of images and of texts, runs of a model with experts and of one without."""
    root = tmp_path_factory.mktemp("analyze")
    save_tokenizer(root / "tokenizer")
    noise = np.random.default_rng(0)
    lines = []
    for number in range(6):
        Image.fromarray(noise.integers(0, 256, (112, 112, 3), dtype=np.uint8)).save(root / f"{number}.png")
        question = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
        answer = {"role": "assistant", "content": "noise " * 3}
        lines.append({"messages": [{"role": "user", "content": question}, answer], "images": [f"{number}.png"]})
    (root / "records.jsonl").write_text("\n".join(map(json.dumps, lines)))
    write_shards(root / "records.jsonl", root / "images", format="messages", samples_per_shard=10)
    (root / "texts.jsonl").write_text("\n".join(json.dumps({"text": "some text " * 4}) for _ in range(6)))
    write_shards(root / "texts.jsonl", root / "texts", format="text", samples_per_shard=10)
    for name in ("images", "texts"):
        index_directory(root / name)
    wide = {"vocab_size": 264}
    save(smallest_qwen3_moe(**wide), root / "run", root / "tokenizer")
    save(smallest_config(vocab_size=264), root / "dense", root / "tokenizer")
    return root


def routing(*arguments: object) -> Result:
    return CliRunner().invoke(analyze, ["routing", *map(str, arguments)])


@pytest.mark.slow
def test_a_recipe_is_measured_by_source_and_kind_of_token(root: Path, tmp_path: Path) -> None:
    data = DataConfig(
        sources=tuple(SourceConfig(name=name, path=root / name, max_epochs=1) for name in ("images", "texts")),
        tokenizer=root / "tokenizer",
        packing=PackingConfig(seq_length=256, buffer_size=4),
        audit_log=tmp_path / "audit.jsonl",
        num_threads=0,
    )
    (tmp_path / "recipe.yaml").write_text("data:\n  " + to_yaml(data).replace("\n", "\n  "))
    options = ("--segment-lengths", "4,12", "--cache-sizes", "1,4", "--packs", 3, "--out", tmp_path / "page.html")
    result = routing(root / "run", "--data", tmp_path / "recipe.yaml", *options, "--json")
    assert result.exit_code == 0, result.exception
    document: dict[str, Any] = json.loads(result.stdout)
    assert (document["packs"], document["experts"], document["layers"]) == (3, 8, [0, 1])
    groups = {(score["source"], score["modality"], score["segment_length"]) for score in document["scores"]}
    assert {("images", "visual", 12), ("images", "text", 4), ("texts", "text", 12), ("all", "mixed", 12)} <= groups
    assert ("texts", "visual", 4) not in groups
    assert all(score["hit_rates"][1] == 1 for score in document["scores"])  # four times two are all experts
    assert "SCH, visual tokens, windows of 12" in (tmp_path / "page.html").read_text()
    assert not (tmp_path / "audit.jsonl").exists()  # the log of a run is not touched


def test_a_directory_of_shards_is_one_source_with_the_tokenizer_of_the_run(root: Path) -> None:
    result = routing(root / "run", "--data", root / "texts", "--segment-lengths", "8,4096", "--seq-length", 128)
    assert result.exit_code == 0, result.exception
    assert "2 layers of 8 experts, 2 for each token" in result.stdout
    assert "texts" in result.stdout
    assert "are in samples shorter than a window of 4096" in result.stdout


def test_an_exported_directory_routes_as_the_run_it_was_made_of(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mindvl_train.checkpoints.export import export_checkpoint

    export_checkpoint(root / "run", root / "directory", min_pixels=784, max_pixels=15680)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run the directory's code"))
    options = ("--data", root / "texts", "--segment-lengths", "8", "--seq-length", 128, "--json")
    documents = []
    for model in ("run", "directory"):
        result = routing(root / model, *options)
        assert result.exit_code == 0, result.exception
        documents.append(json.loads(result.stdout) | {"model": None})
    assert documents[0] == documents[1]


def test_what_cannot_be_measured_is_refused(root: Path) -> None:
    assert isinstance(routing(root / "dense", "--data", root / "texts").exception, ModelError)
    short = routing(root / "run", "--data", root / "texts", "--segment-lengths", "4096", "--seq-length", 128)
    assert isinstance(short.exception, CliError)
    assert "has 4096 tokens" in str(short.exception)
    assert "not a list of numbers" in routing(root / "run", "--data", root / "texts", "--segment-lengths", "x").output
    assert "below 1" in routing(root / "run", "--data", root / "texts", "--segment-lengths", "0,4").output
