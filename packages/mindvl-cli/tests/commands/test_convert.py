# SPDX-License-Identifier: Apache-2.0
"""Tests of `mindvl convert`: which way, and refusals; what it writes is tested in mindvl-train and tests/demo."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from mindvl_cli.commands.convert import convert
from mindvl_model import WeightError, set_up_device
from mindvl_model.testing.tiny import randomize, smallest_config
from mindvl_train import CheckpointError


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers directory of the smallest model, without a tokenizer."""
    set_up_device()
    from mindvl_model.hf.config_json import hf_config
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_model.megatron.process import single_process
    from mindvl_model.model import MindVLModel
    from mindvl_model.parameters import named_tensors
    from mindvl_model.weights.directory import write_weights
    from mindvl_model.weights.names import weight_rules
    from mindvl_model.weights.sharding import split

    path, config = tmp_path_factory.mktemp("model"), smallest_config()
    with single_process():
        model = MindVLModel(config, BuildConfig())
        randomize(model)
        held = named_tensors(model)
        rules = weight_rules(config)
        write_weights(path, [pair for rule in rules for pair in split(rule, held[rule.param_name].detach())])
    (path / "config.json").write_text(json.dumps(hf_config(config, torch.float32)))
    return path


def test_a_directory_becomes_a_checkpoint_and_every_tensor_is_accounted_for(directory: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(convert, [str(directory), str(tmp_path / "run"), "--to", "mindvl", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["checkpoint"] == str(tmp_path / "run" / "checkpoints" / "step-00000000")
    assert (Path(report["checkpoint"]) / "manifest.json").is_file()
    of_directory = report["directories"][str(directory)]
    assert len(of_directory["loaded"]) == 45  # 21 of the vision encoder, 5 of the projector, 19 of the language model
    assert "model.visual.patch_embed.proj.weight" in of_directory["reshaped"]
    assert of_directory["skipped"] == of_directory["redundant"] == report["fresh"] == []

    again = CliRunner().invoke(convert, [str(tmp_path / "run"), str(tmp_path / "model")])
    assert "was converted without a tokenizer" in str(again.exception)
    assert not (tmp_path / "model").exists()


def test_a_missing_source_is_refused_with_what_may_be_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(convert, [str(tmp_path / "run"), str(tmp_path / "model")])
    assert "run does not exist. Name a run directory, a checkpoint, a model directory" in result.output

    best = CliRunner().invoke(convert, [str(tmp_path / "checkpoints" / "best"), str(tmp_path / "model")])
    assert "there is no best checkpoint yet" in str(best.exception)


def test_a_directory_without_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    result = CliRunner().invoke(convert, [str(tmp_path), str(tmp_path / "model")])

    assert isinstance(result.exception, CheckpointError)
    assert str(tmp_path) in str(result.exception)
    assert not (tmp_path / "model").exists()


def test_parts_without_a_tokenizer_are_refused_before_anything_is_written(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "language").mkdir()
    (tmp_path / "language" / "config.json").write_text('{"model_type": "qwen3"}')
    options = ["--vision", str(directory), "--language", str(tmp_path / "language"), str(tmp_path / "run")]
    result = CliRunner().invoke(convert, options)
    assert isinstance(result.exception, WeightError)
    assert str(tmp_path / "language") in str(result.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-pixels", "0"], "0 is not in the range"),
        (["--max-pixels", "-1"], "-1 is not in the range"),
        (["--min-pixels", "3136", "--max-pixels", "784"], "--min-pixels: 3136 is above --max-pixels 784"),
        (["--vision", "."], "2 paths are given"),
        (["--to", "mindvl"], "the source is in the mindvl format already"),
        (["--size", "tiny"], "--size: a checkpoint already defines the model"),
    ],
)
def test_options_that_do_not_fit_are_wrong_usage(tmp_path: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(convert, [str(tmp_path), str(tmp_path / "model"), *options])

    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
