# SPDX-License-Identifier: Apache-2.0
"""Rows of the vocabulary that some models lack keep the ratio of the other models' weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindvl_merge import MergeConfig, merge


def _model(path, tokens, value):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 2}))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}}))
    save_file({"model.embed_tokens.weight": torch.full((len(tokens), 2), value)}, path / "model.safetensors")
    return path


@pytest.fixture
def models(tmp_path):
    """Three models; the second has no row for the last token of the first."""
    tokens = ["a", "b", "c"]
    return (
        _model(tmp_path / "0", [*tokens, "x"], 1.0),
        _model(tmp_path / "1", tokens, 2.0),
        _model(tmp_path / "2", ["x", *tokens], 6.0),
    )


def _rows(tmp_path, models, **values):
    document = merge(MergeConfig(models=models, out=tmp_path / "out", match_tokens=True, **values))
    rows = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"][:, 0].tolist()
    return rows, document


def test_the_models_that_have_a_row_keep_the_ratio_of_their_weights(tmp_path, models):
    rows, document = _rows(tmp_path, models, weights=(0.25, 0.5, 0.25))
    # 0.25 * 1 + 0.5 * 2 + 0.25 * 6 = 2.75; without the second model (0.25 * 1 + 0.25 * 6) / 0.5 = 3.5
    assert rows == [2.75, 2.75, 2.75, 3.5]
    assert document["rules"][0]["num_missing_rows"] == {"1": 1}


def test_a_row_of_models_without_weight_is_their_mean(tmp_path, models):
    assert _rows(tmp_path, models, weights=(0.0, 1.0, 0.0))[0] == [2.0, 2.0, 2.0, 3.5]


def test_two_models_keep_the_row_of_the_only_one_that_has_it(tmp_path, models):
    assert _rows(tmp_path, models[:2])[0] == [1.5, 1.5, 1.5, 1.0]


def test_a_model_without_a_row_does_not_differ_from_the_base(tmp_path, models):
    base = _model(tmp_path / "base", ["a", "b", "c", "x"], 1.0)
    rows, _ = _rows(tmp_path, models, method="task_arithmetic", base=base, scale=0.5)
    # 1 + 0.5 * (0 + 1 + 5), and without the second model 1 + 0.5 * (0 + 5)
    assert rows == [4.0, 4.0, 4.0, 3.5]


def test_a_base_without_a_row_takes_the_mean_of_the_models(tmp_path, models):
    base = _model(tmp_path / "base", ["a", "b", "c"], 1.0)
    rows, _ = _rows(tmp_path, models, method="task_arithmetic", base=base, scale=0.25)
    # 1 + 0.25 * (0 + 1 + 5); the base of the last row is (1 + 6) / 2, and the differences from it cancel
    assert rows == [2.5, 2.5, 2.5, 3.5]
