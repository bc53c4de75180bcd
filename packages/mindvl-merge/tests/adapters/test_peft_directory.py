# SPDX-License-Identifier: Apache-2.0
"""Directories that peft wrote are read; what is more than two matrices per layer is refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindvl_merge import DirectoryError
from mindvl_merge.adapters.peft_directory import AdapterDirectory, is_adapter_directory, model_directory_problem

SETTINGS = dict(r=2, lora_alpha=3, target_modules=["q_proj"])


def test_ranks_and_scalings_are_those_of_peft(make_adapter):
    both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    path = make_adapter(
        "a", **SETTINGS, target_parameters=both, rank_pattern={r"layers\.1\.q_proj": 6, "gate_up_proj": 4}
    )
    layers = AdapterDirectory(path).layers
    found = {name: (layer.rank, layer.scaling, layer.size) for name, layer in layers.items() if ".1." in name}
    assert found == {
        "model.layers.1.q_proj": (6, 0.5, (1, 6, 6)),
        "model.layers.1.mlp.experts.gate_up_proj": (4, 0.75, (3, 8, 6)),
        "model.layers.1.mlp.experts.down_proj": (2, 1.5, (3, 6, 4)),
    }
    assert layers["model.layers.0.q_proj"].rank == 2


def test_a_directory_of_adapters_is_no_model_directory(make_adapter, tmp_path):
    path = make_adapter("a", **SETTINGS)
    assert (
        f"is a LoRA adapter without its base model. Fold it into its base model (mindvl convert BASE OUT --merge-adapter {path})"
        in (model_directory_problem(path) or "")
    )
    assert (model_directory_problem(tmp_path) or "").endswith("has no config.json. Give an exported model.")
    (path / "config.json").touch()
    assert model_directory_problem(path) is None


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (dict(use_dora=True), "use_dora=True"),
        (dict(bias="lora_only"), "bias='lora_only'"),
        (dict(modules_to_save=["v_proj"]), r"modules_to_save=\['v_proj'\]"),
        (dict(lora_bias=True), "lora_bias=True"),
    ],
)
def test_more_than_two_matrices_are_refused_by_name(make_adapter, settings, key):
    path = make_adapter("a", **SETTINGS, **settings)
    with pytest.raises(DirectoryError, match=rf"adapter_config\.json: {key} is not supported in an average"):
        AdapterDirectory(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(peft_type="LOHA"), "peft_type is 'LOHA'"),
        (dict(r=0), "r must be an integer >= 1, got 0"),
        (dict(r=3), "2 rows and 2 columns, but adapter_config.json has rank 3"),
        (dict(lora_alpha="x"), "lora_alpha must be a finite number, got 'x'"),
        (dict(rank_pattern={"(": 2}), "is not a regular expression"),
        (dict(init_lora_weights="pissa"), "init_lora_weights='pissa' is not supported"),
        (dict(a_new_feature={"x": 1}), "a_new_feature=.* is not supported"),
        (dict(target_parameters=["embed.weight"]), "target_parameters=.* is not supported"),
    ],
)
def test_other_configurations_are_refused(make_adapter, values, message):
    path = make_adapter("a", **SETTINGS)
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    with pytest.raises(DirectoryError, match=message):
        AdapterDirectory(path)


@pytest.mark.parametrize("name", ["base_model.model.q.lora_magnitude_vector", "base_model.model.norm.weight"])
def test_other_tensors_are_refused(make_adapter, name):
    path = make_adapter("a", **SETTINGS)
    file = path / "adapter_model.safetensors"
    save_file(load_file(file) | {name: torch.ones(2)}, file)
    with pytest.raises(DirectoryError, match=f"tensor {name} with shape .* is not a matrix of a linear layer"):
        AdapterDirectory(path)


def test_a_missing_matrix_and_pickled_weights_are_refused(make_adapter):
    path = make_adapter("a", **SETTINGS)
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop("base_model.model.model.layers.0.q_proj.lora_B.weight")
    save_file(tensors, file)
    with pytest.raises(DirectoryError, match="has only one of two matrices"):
        AdapterDirectory(path)
    file.rename(path / "adapter_model.bin")
    with pytest.raises(DirectoryError, match="pickled weights are not read"):
        AdapterDirectory(path)


def test_a_whole_model_with_adapters_beside_it_is_a_model(make_adapter):
    path = make_adapter("a", **SETTINGS)
    assert is_adapter_directory(path)
    (path / "model.safetensors").touch()
    assert not is_adapter_directory(path)
