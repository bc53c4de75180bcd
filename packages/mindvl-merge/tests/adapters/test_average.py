# SPDX-License-Identifier: Apache-2.0
"""The average of adapters is, folded by peft, the average of the models into which peft folds each adapter."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from mindvl_merge import MergeConfig, MergeError, merge

CASES = {
    "equal ranks": [dict(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])] * 3,
    "other rank, alpha and rsLoRA": [
        dict(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj"]),
        dict(r=5, lora_alpha=7, target_modules=["q_proj", "v_proj"], use_rslora=True, lora_dropout=0.1),
    ],
    "other layers": [
        dict(r=2, lora_alpha=3, target_modules=["q_proj"]),
        dict(r=3, lora_alpha=3, target_modules="model.layers.1.*v_proj"),
        dict(r=1, lora_alpha=1, target_modules=["v_proj", "q_proj"], layers_to_transform=[0]),
    ],
    "patterns": [
        dict(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj"], rank_pattern={"q_proj": 9}, use_rslora=True),
        dict(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj"], alpha_pattern={r"layers\.1\.v_proj": 5}),
    ],
    "experts": [
        dict(
            r=2,
            lora_alpha=4,
            target_modules=["q_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        ),
        dict(r=3, lora_alpha=4, target_modules=[], target_parameters=["mlp.experts.down_proj"]),
    ],
    "experts, one parameter each": [
        dict(r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"]),
        dict(r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=["experts.down_proj"]),
    ],
    "experts with twice the rank": [
        dict(
            r=rank,
            lora_alpha=4,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            rank_pattern={r"mlp\.experts\.gate_up_proj": 2 * rank},
            alpha_pattern={r"mlp\.experts\.gate_up_proj": 8},
        )
        for rank in (1, 2)
    ],
}


def _folded(base, adapter):
    with torch.no_grad():
        return PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_peft_folds_the_average_into_the_average_of_the_folded_models(
    tmp_path, make_base, make_adapter, case, is_weighted
):
    adapters = [make_adapter(f"a{number}", **settings) for number, settings in enumerate(CASES[case])]
    weights = (0.7, 0.5, -0.2)[: len(adapters)] if len(adapters) == 3 else (0.7, 0.3)
    weights = weights if is_weighted else (1 / len(adapters),) * len(adapters)
    merge(MergeConfig(models=tuple(adapters), out=tmp_path / "out", weights=weights))
    folded = [_folded(make_base(), path) for path in adapters]
    merged, before = _folded(make_base(), tmp_path / "out"), make_base().state_dict()
    assert merged.keys() == before.keys()
    for name in merged:
        expected = sum(w * one[name].double() for w, one in zip(weights, folded, strict=True))
        torch.testing.assert_close(merged[name].double(), expected, rtol=1e-6, atol=1e-6)
    assert max(float((merged[name] - before[name]).abs().max()) for name in merged) > 0.1


def test_all_layers_have_the_sum_of_the_ranks_and_columns_of_like_adapters_are_copied(tmp_path, make_adapter):
    settings = dict(lora_alpha=6, target_modules=["q_proj"])
    paths = [make_adapter("a", r=2, **settings), make_adapter("b", r=2, **settings)]
    merge(MergeConfig(models=tuple(paths), out=tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (4, 6, {})  # 6 / 4 = 6 / 2 * weight 0.5
    assert config["target_modules"] == ["q_proj"]
    files = [load_file(path / "adapter_model.safetensors") for path in (*paths, tmp_path / "out")]
    name = "base_model.model.model.layers.1.q_proj.lora_B.weight"
    assert torch.equal(files[2][name], torch.cat((files[0][name], files[1][name]), dim=1))
    name = name.replace("_B", "_A")
    assert torch.equal(files[2][name], torch.cat((files[0][name], files[1][name])))


def test_the_first_adapter_can_have_no_weight(tmp_path, make_base, make_adapter):
    paths = [make_adapter(name, r=2, lora_alpha=2, target_modules=["q_proj"]) for name in "ab"]
    merge(MergeConfig(models=tuple(paths), out=tmp_path / "out", weights=(0.0, 1.0)))
    merged, second = _folded(make_base(), tmp_path / "out"), _folded(make_base(), paths[1])
    torch.testing.assert_close(merged, second, rtol=1e-6, atol=1e-6)


def test_weights_of_a_part_and_the_manifest(tmp_path, make_base, make_adapter):
    paths = [make_adapter(name, r=2, lora_alpha=2, target_modules=["q_proj", "v_proj"]) for name in "ab"]
    config = MergeConfig(models=tuple(paths), out=tmp_path / "out", part_weights={"*v_proj": (1.0, 0.0)})
    document = merge(config)
    merged, first = _folded(make_base(), tmp_path / "out"), _folded(make_base(), paths[0])
    name = "model.layers.0.v_proj.weight"
    torch.testing.assert_close(merged[name], first[name], rtol=1e-6, atol=1e-6)
    assert document == json.loads((tmp_path / "out" / "merge.json").read_text())
    assert [one["path"] for one in document["models"]] == [str(path) for path in paths]
    assert document["models"][0]["digest"] != document["models"][1]["digest"]
    assert document["command"].startswith(f"mindvl merge {paths[0]} {paths[1]} --out ")
    assert (document["num_merged"], document["adapter_rank"]) == (8, 4)
    again = merge(MergeConfig(models=(tmp_path / "out",), out=tmp_path / "again"))
    assert again["models"][0]["digest"] == document["digest"]
    assert not list(tmp_path.glob(".*"))


def test_the_data_type_is_that_of_the_adapters_or_chosen(tmp_path, make_adapter):
    paths = [make_adapter(name, r=2, lora_alpha=2, target_modules=["q_proj"]) for name in "ab"]
    file = paths[1] / "adapter_model.safetensors"
    save_file({name: one.bfloat16() for name, one in load_file(file).items()}, file)
    with pytest.raises(MergeError, match=r"stored as bfloat16, and the first one of .*a as float32\. .*--dtype fp32"):
        merge(MergeConfig(models=tuple(paths), out=tmp_path / "out"))
    merge(MergeConfig(models=tuple(paths), out=tmp_path / "out", dtype="bf16"))
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {one.dtype for one in written.values()} == {torch.bfloat16}


def test_values_that_are_not_finite_are_refused_and_nothing_is_left(tmp_path, make_adapter):
    paths = [make_adapter(name, r=2, lora_alpha=2, target_modules=["q_proj"]) for name in "ab"]
    file = paths[1] / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(MergeError, match="values that are not finite"):
        merge(MergeConfig(models=tuple(paths), out=tmp_path / "out"))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b"]


def test_a_lora_config_reads_the_written_file(tmp_path, make_adapter):
    path = make_adapter("a", r=2, lora_alpha=3, target_modules=["q_proj"])
    merge(MergeConfig(models=(path, path), out=tmp_path / "out", weights=(0.25, 0.75)))
    assert LoraConfig.from_pretrained(tmp_path / "out").r == 4
