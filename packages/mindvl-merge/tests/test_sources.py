# SPDX-License-Identifier: Apache-2.0
"""Which tensors are merged with which: parts under other prefixes, tied heads, grown vocabularies, extra layers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindvl_merge import MergeConfig, MergeError, merge

TOKENS = [f"t{number}" for number in range(6)]


def _model(path, tensors, config, tokens=TOKENS, special=()):
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = {
        "model": {"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)}, "merges": []},
        "added_tokens": [{"id": number, "content": token} for token, number in special],
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def _decoder(prefix, seed, rows=6, head=True):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{prefix}embed_tokens.weight": torch.randn(rows, 4, generator=generator),
        f"{prefix}layers.0.mlp.up_proj.weight": torch.randn(8, 4, generator=generator),
    }
    return tensors | ({"lm_head.weight": torch.randn(rows, 4, generator=generator)} if head else {})


LANGUAGE = {"model_type": "qwen3", "hidden_size": 4, "rope_theta": 1e6, "num_attention_heads": 2}


@pytest.fixture
def multimodal(tmp_path):
    """A multimodal model of newer transformers, with two more tokens."""
    tensors = _decoder("model.language_model.", 0, rows=8) | {"model.visual.blocks.0.w": torch.ones(3)}
    config = {
        "model_type": "qwen2_5_vl",
        "image_token_id": 7,
        "vision_config": {"depth": 1},
        "text_config": LANGUAGE | {"model_type": "x_text", "rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}},
    }
    return _model(tmp_path / "vl", tensors, config, special=(("<image>", 7),))


def _merged(tmp_path, *models, **values):
    document = merge(MergeConfig(models=models, out=tmp_path / "out", **values))
    return load_file(tmp_path / "out" / "model.safetensors"), document


def test_the_language_model_is_merged_with_the_original_one(tmp_path, multimodal):
    mine, theirs = load_file(multimodal / "model.safetensors"), _decoder("model.", 1)
    original = _model(tmp_path / "lm", theirs, LANGUAGE)
    merged, document = _merged(tmp_path, multimodal, original, only=("language",))
    assert merged.keys() == mine.keys()
    assert torch.equal(merged["model.visual.blocks.0.w"], torch.ones(3))
    name = "layers.0.mlp.up_proj.weight"
    mean = (mine[f"model.language_model.{name}"].double() + theirs[f"model.{name}"].double()) / 2
    assert torch.equal(merged[f"model.language_model.{name}"], mean.float())
    embedding = merged["model.language_model.embed_tokens.weight"]
    mean = (mine["model.language_model.embed_tokens.weight"][:6] + theirs["model.embed_tokens.weight"]) / 2
    torch.testing.assert_close(embedding[:6], mean)
    assert torch.equal(embedding[6:], mine["model.language_model.embed_tokens.weight"][6:])  # rows of new tokens
    assert document["tensors"][f"model.language_model.{name}"]["sources"] == {"1": f"model.{name}"}


def test_the_language_model_may_be_first(tmp_path, multimodal):
    original = _model(tmp_path / "lm", _decoder("model.", 1), LANGUAGE)
    merged, document = _merged(tmp_path, original, multimodal, only=("language",))
    assert merged.keys() == _decoder("model.", 1).keys()
    assert document["unused"] == [{"model": 1, "tensor": "model.visual.blocks.0.w"}]


def test_rows_are_matched_by_token(tmp_path, multimodal):
    theirs = _decoder("model.", 1)
    tokens = ["t5", "t4", "t3", "t2", "t1", "t0"]
    original = _model(tmp_path / "lm", theirs, LANGUAGE, tokens=tokens)
    merged, _ = _merged(tmp_path, multimodal, original, only=("language",), weights=(0.0, 1.0))
    for name in ("embed_tokens.weight", "lm_head.weight"):
        ours = f"model.language_model.{name}" if name.startswith("embed") else name
        other = theirs[f"model.{name}"] if name.startswith("embed") else theirs[name]
        assert torch.equal(merged[ours][:6], other.flip(0))


def test_the_head_of_a_tied_model_is_its_embedding(tmp_path, multimodal):
    theirs = _decoder("model.", 1, head=False)
    original = _model(tmp_path / "lm", theirs, LANGUAGE | {"tie_word_embeddings": True})
    merged, _ = _merged(tmp_path, multimodal, original, only=("language",), weights=(0.0, 1.0))
    assert torch.equal(merged["lm_head.weight"][:6], theirs["model.embed_tokens.weight"])
    with pytest.raises(MergeError, match=r"the first is lm_head\.weight of .*name the model with more tensors first"):
        merge(MergeConfig(models=(original, multimodal), out=tmp_path / "out2", only=("language",)))


def test_an_output_layer_that_is_missing_is_not_replaced_by_the_embedding(tmp_path, multimodal):
    untied = LANGUAGE | {"tie_word_embeddings": False}
    original = _model(tmp_path / "lm", _decoder("model.", 1, head=False), untied)
    with pytest.raises(MergeError, match=r"in only one of the models, the first is lm_head\.weight"):
        merge(MergeConfig(models=(multimodal, original), out=tmp_path / "out", only=("language",)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 1e4}, r"rope_parameters\.rope_theta is 10000\.0"),
        ({"num_attention_heads": 4}, "num_attention_heads is 4"),
    ],
)
def test_another_language_model_is_refused(tmp_path, multimodal, change, message):
    original = _model(tmp_path / "lm", _decoder("model.", 1), LANGUAGE | change)
    with pytest.raises(MergeError, match=message):
        _merged(tmp_path, multimodal, original, only=("language",))


def test_a_tokenizer_without_common_tokens_is_refused(tmp_path, multimodal):
    original = _model(tmp_path / "lm", _decoder("model.", 1), LANGUAGE, tokens=["a", "b", "c", "d", "e", "t0"])
    with pytest.raises(MergeError, match="only 1 of 7 tokens"):
        _merged(tmp_path, multimodal, original, only=("language",))


def test_without_only_the_message_names_the_option(tmp_path, multimodal):
    original = _model(tmp_path / "lm", _decoder("model.", 1), LANGUAGE)
    with pytest.raises(MergeError, match="--only language"):
        _merged(tmp_path, multimodal, original)


def test_layers_that_one_model_lacks_are_refused_copied_or_left_out_by_name(tmp_path):
    first = _decoder("model.", 0) | {"model.layers.1.eh_proj.weight": torch.full((2,), 3.0)}
    models = [_model(tmp_path / "a", first, LANGUAGE), _model(tmp_path / "b", _decoder("model.", 1), LANGUAGE)]
    for order in (models, models[::-1]):
        with pytest.raises(MergeError, match=r"layers\.1\.eh_proj\.weight of .*--allow-missing"):
            _merged(tmp_path, *order)
    merged, document = _merged(tmp_path, *models, allow_missing=("model.layers.1.*",))
    assert merged["model.layers.1.eh_proj.weight"].tolist() == [3, 3]
    assert document["num_copied"] == 1
    document = merge(
        MergeConfig(models=tuple(models[::-1]), out=tmp_path / "out2", allow_missing=("model.layers.1.*",))
    )
    assert document["unused"] == [{"model": 1, "tensor": "model.layers.1.eh_proj.weight"}]


def test_published_and_newer_names_are_one_model(tmp_path):
    one = _model(tmp_path / "a", _decoder("model.", 0) | {"visual.blocks.0.w": torch.ones(3)}, LANGUAGE)
    two = _model(
        tmp_path / "b", _decoder("model.language_model.", 1) | {"model.visual.blocks.0.w": torch.zeros(3)}, LANGUAGE
    )
    merged, _ = _merged(tmp_path, one, two)
    assert merged["visual.blocks.0.w"].tolist() == [0.5] * 3


def test_weights_of_a_part_or_pattern_are_used_there(tmp_path, multimodal):
    other = tmp_path / "vl2"
    other.mkdir()
    for file in multimodal.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tensors = load_file(multimodal / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, other / "model.safetensors")
    weights = {"vision": (0.0, 1.0), "*.mlp.*": (0.75, 0.25)}
    merged, _ = _merged(tmp_path, multimodal, other, part_weights=weights)
    added = {name: float((merged[name] - tensors[name]).mean()) for name in tensors}
    assert added == pytest.approx(
        {
            "model.visual.blocks.0.w": 1.0,
            "model.language_model.layers.0.mlp.up_proj.weight": 0.25,
            "model.language_model.embed_tokens.weight": 0.5,
            "lm_head.weight": 0.5,
        },
        abs=1e-6,
    )


def test_a_method_with_a_base_reads_it(tmp_path, make_directory, random_tensors):
    models = [make_directory(name, random_tensors(seed)) for seed, name in enumerate("abc")]
    document = merge(
        MergeConfig(models=tuple(models[:2]), base=models[2], method="task_arithmetic", out=tmp_path / "out")
    )
    merged = load_file(tmp_path / "out" / "model.safetensors")
    a, b, c = (random_tensors(seed)["language.embed"].double() for seed in range(3))
    torch.testing.assert_close(merged["language.embed"], (a + b - c).float())
    assert document["models"][2]["role"] == "base"
    assert f"--base {models[2]}" in document["command"]
