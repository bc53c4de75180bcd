# SPDX-License-Identifier: Apache-2.0
"""Models that use their weights differently are not averaged; what does not matter is a warning by name."""

import json
import logging

import pytest
import torch

from mindvl_merge import DirectoryError, MergeConfig, MergeError, merge
from mindvl_merge.directory import ModelDirectory
from mindvl_merge.parents import check_parents

CONFIG = {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0",
    "use_cache": True,
    "vision_config": {"depth": 2},
}


def _write(model, files):
    for name, content in files.items():
        (model / name).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def pair(tmp_path, make_directory, random_tensors):
    """Writes two models whose second has other files, and merges them."""

    def merged(first, other, **values):
        models = [make_directory(name, random_tensors(0), config=CONFIG) for name in ("a", "b")]
        _write(models[0], first)
        _write(models[1], other)
        return merge(MergeConfig(models=tuple(models), out=tmp_path / "out", **values))

    return merged


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rope_theta": 1e4}, "rope_parameters.rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters.factor"),
        ({"num_attention_heads": 8}, "num_attention_heads"),
        ({"model_type": "qwen2"}, "model_type"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"vision_config": {"depth": 3}}, "vision_config.depth"),
        ({"residual_scale": 2}, "residual_scale"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
    ],
)
def test_a_key_that_changes_the_function_is_refused(pair, tmp_path, changes, key):
    with pytest.raises(DirectoryError, match=rf"b.config\.json: {key} is .*--allow-different '{key}'") as caught:
        pair({}, {"config.json": CONFIG | changes})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_key_may_differ_when_the_user_names_it(pair):
    changed = {"config.json": CONFIG | {"rms_norm_eps": 1e-5, "rope_theta": 1e4}}
    manifest = pair({}, changed, allow_different=("rms_norm_eps", "rope_parameters.rope_theta"))
    assert "rms_norm_eps (1e-05, in the first model 1e-06)" in manifest["warnings"][0]
    assert manifest["allow_different"] == ["rms_norm_eps", "rope_parameters.rope_theta"]


def test_keys_that_a_terminal_would_obey_are_escaped(pair):
    with pytest.raises(DirectoryError, match="x1b") as caught:
        pair({}, {"config.json": CONFIG | {"\x1b[2J": 1, "\ud800": 2}})
    assert str(caught.value).isprintable()


def test_all_keys_that_differ_are_named_together(pair):
    with pytest.raises(DirectoryError, match=r"also different: rms_norm_eps, rope_parameters\.rope_theta"):
        pair({}, {"config.json": CONFIG | {"model_type": "x", "rms_norm_eps": 1e-5, "rope_theta": 1e4}})


def test_other_keys_are_warned_of_by_name(pair, caplog):
    changed = CONFIG | {"transformers_version": "5.23.0", "use_cache": None, "torch_dtype": "float32"}
    with caplog.at_level(logging.WARNING):
        manifest = pair({}, {"config.json": changed, "modeling_tiny.py": "# other code\n"})
    assert len(manifest["warnings"]) == 2
    for name in ("torch_dtype ('float32', in the first model 'bfloat16')", "transformers_version", "use_cache"):
        assert name in manifest["warnings"][0]
    assert "modeling_tiny.py" in manifest["warnings"][1]
    assert [record.message for record in caplog.records] == manifest["warnings"]


def test_the_same_model_saved_by_two_versions_of_transformers_is_the_same(pair):
    four = CONFIG | {"rope_scaling": None}
    five = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    five |= {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "layer_types": ["full_attention", "full_attention"],
    }
    assert pair({"config.json": four}, {"config.json": five})["warnings"] == []


PIXELS = {"patch_size": 14, "image_mean": [0.5, 0.5, 0.5], "do_resize": True, "size": {"longest_edge": 100}}


@pytest.mark.parametrize(
    ("name", "document", "key"),
    [
        ("preprocessor_config.json", PIXELS | {"patch_size": 16}, "patch_size"),
        ("preprocessor_config.json", PIXELS | {"image_mean": [0, 0, 0]}, "image_mean"),
        ("processor_config.json", {"image_processor": PIXELS | {"do_resize": False}}, r"image_processor\.do_resize"),
    ],
)
def test_processors_that_show_other_pixels_are_refused(pair, name, document, key):
    first = PIXELS if name.startswith("pre") else {"image_processor": PIXELS}
    with pytest.raises(DirectoryError, match=rf"b.{name}: {key} is"):
        pair({name: first}, {name: document})


def test_other_limits_of_image_sizes_and_of_generation_are_warnings(pair):
    manifest = pair(
        {"preprocessor_config.json": PIXELS, "generation_config.json": {"top_k": 1}},
        {"preprocessor_config.json": PIXELS | {"size": {"longest_edge": 200}}, "generation_config.json": {"top_k": 2}},
    )
    assert [key in text for key, text in zip(("size.longest_edge", "top_k"), manifest["warnings"], strict=True)]


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1, "a": 2}', "[" * 5000, '{"n": ' + "9" * 5000 + "}", "\x00"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "processor_config.json"])
def test_a_damaged_file_is_named(pair, name, content):
    with pytest.raises(DirectoryError, match=rf"b.{name}: the JSON (is|must be)"):
        pair({name: "{}"}, {name: content})


def test_a_model_without_configuration_cannot_be_compared(tmp_path, make_directory, random_tensors):
    models = [make_directory(name, random_tensors(0)) for name in ("a", "b")]
    (models[1] / "config.json").unlink()
    with pytest.raises(DirectoryError, match=r"b.config\.json: the file is missing"):
        merge(MergeConfig(models=tuple(models), out=tmp_path / "out"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("weights", [None, (1.0, 0.0)])
def test_values_that_are_not_finite_are_named(tmp_path, make_directory, random_tensors, value, weights):
    models = [make_directory("a", random_tensors(0))]
    tensors = random_tensors(1)
    tensors["language.embed"][3, 1] = value
    models.append(make_directory("b", tensors))
    with pytest.raises(MergeError, match=r"b.model\.safetensors: tensor language\.embed has NaN or infinity"):
        merge(MergeConfig(models=tuple(models), out=tmp_path / "out", weights=weights))
    with pytest.raises(MergeError, match=r"b.model\.safetensors: tensor language\.embed has NaN"):
        merge(MergeConfig(models=tuple(models[::-1]), out=tmp_path / "out", only=("vision.",)))  # a copied tensor
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["ties", "dare_linear", "dare_ties"])
def test_values_that_are_not_finite_are_named_where_the_method_drops_them(
    tmp_path, make_directory, random_tensors, method
):
    models = [make_directory(name, random_tensors(seed)) for seed, name in enumerate(("a", "base"))]
    tensors = random_tensors(2)
    tensors["language.embed"][:] = float("nan")  # every value: dare drops nearly all of them
    bad = make_directory("b", tensors)
    config = MergeConfig(
        models=(models[0], bad), base=models[1], out=tmp_path / "out", method=method, density=1e-9, weights=(1.0, 0.0)
    )
    with pytest.raises(
        MergeError, match=r"b.model\.safetensors: tensor language\.embed has NaN or infinity \(28 values"
    ):
        merge(config)


def test_values_beyond_the_type_of_the_result_are_refused(tmp_path, make_directory):
    model = make_directory("a", {"w": torch.tensor([1.0, 1e5])})
    with pytest.raises(MergeError, match="tensor w has values outside the range of float16"):
        merge(MergeConfig(models=(model,), out=tmp_path / "out", dtype="fp16"))


POOL = (None, True, 0, 5, 1.5, "", "x", [], [1], [["a", 1]], {}, {"a": {"b": None}}, [{"name": [], "template": 1}])
FILES = {
    "config.json": CONFIG | {"rope_scaling": {"type": "mrope"}, "layer_types": ["full_attention"]},
    "tokenizer.json": {
        "added_tokens": [{"id": 3, "content": "c", "special": True}],
        "normalizer": None,
        "model": {"vocab": {"a": 0, "b": 1}, "merges": ["a b"]},
    },
    "tokenizer_config.json": {"chat_template": "x", "added_tokens_decoder": {"3": {}}, "eos_token": "c"},
    "chat_template.json": {"chat_template": "x"},
    "processor_config.json": {"image_processor": {"patch_size": 14, "size": {"longest_edge": 5}}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_value_of_any_type_is_compared_or_refused_in_one_sentence(tmp_path, make_directory, random_tensors, name):
    models = [make_directory(model, random_tensors(0)) for model in ("a", "b")]
    for model in models:
        _write(model, FILES)
    document = FILES[name]
    sections = [(), *((key,) for key, value in document.items() if isinstance(value, dict))]
    for section in sections:
        for key in document[section[0]] if section else document:
            for value in POOL:
                changed = json.loads(json.dumps(document))
                (changed[section[0]] if section else changed)[key] = value
                _write(models[1], {name: changed})
                for order in (models, models[::-1]):
                    try:
                        warnings = check_parents(
                            MergeConfig(models=tuple(order), out=tmp_path / "out"),
                            [ModelDirectory(one) for one in order],
                        )
                    except MergeError as error:
                        warnings = [str(error)]
                    assert all(text.isprintable() and len(text) < 2000 for text in warnings)
