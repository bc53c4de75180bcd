# SPDX-License-Identifier: Apache-2.0
"""Families with experts in config.json, as published and as saved by transformers 5; unsupported values raise errors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mindvl_model import MindVLConfig, ModelError, WeightError, named_config
from mindvl_model.families.qwen3_moe import Qwen3MoEPreset
from mindvl_model.families.registry import write_language
from mindvl_model.hf.config_json import hf_config
from mindvl_model.hf.directory_config import config_from_directory, language_config_from_directory
from mindvl_model.language_config import GroupedQueryAttention, RopeConfig, YarnConfig
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen3_moe

pytestmark = pytest.mark.slow

# config.json of DeepSeek-V3 as it was published.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}

# config.json of Qwen3-30B-A3B as it was published.
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def write(directory: Path, document: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def test_the_published_deepseek_v3_equals_the_decoder_of_the_named_size(tmp_path: Path) -> None:
    assert language_config_from_directory(write(tmp_path, DEEPSEEK_V3)) == named_config("mindvl-671b-a37b").language
    with pytest.raises(WeightError, match=r"model_type='deepseek_v3' .*or name it in init.language"):
        config_from_directory(tmp_path)


def test_the_published_qwen3_moe_is_read(tmp_path: Path) -> None:
    assert (
        language_config_from_directory(write(tmp_path, QWEN3_30B_A3B))
        == Qwen3MoEPreset(
            hidden_size=2048,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            ffn_hidden_size=6144,
            vocab_size=151936,
            num_experts=128,
            experts_per_token=8,
            expert_ffn_hidden_size=768,
        ).decoder()
    )


@pytest.mark.parametrize(
    "config",
    [
        smallest_qwen3_moe(normalize_router=False, tie_embeddings=True, aux_loss_weight=0.0),
        smallest_deepseek_v3(num_mtp_layers=0, num_shared_experts=2, routed_scale=1.5, num_dense_layers=0),
        smallest_deepseek_v3(yarn=None),
        smallest_deepseek_v3(q_lora_rank=None, norm_epsilon=1e-5),
        smallest_deepseek_v3(yarn=YarnConfig(factor=4.0, original_max_positions=128, mscale=0.0, mscale_all_dim=0.0)),
    ],
)
def test_a_configuration_saved_by_transformers_5_gives_the_same_model(tmp_path: Path, config: MindVLConfig) -> None:
    AutoConfig.for_model(**write_language(config.language)).save_pretrained(tmp_path)
    assert language_config_from_directory(tmp_path) == config.language
    assert config_from_directory(write(tmp_path, hf_config(config, torch.float32))) == config


@pytest.mark.parametrize(
    "windows",
    [
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 40960},
        {"use_sliding_window": False, "sliding_window": 128},
    ],
)
def test_windows_that_hide_no_position_are_accepted(tmp_path: Path, windows: dict[str, Any]) -> None:
    plain = language_config_from_directory(write(tmp_path, QWEN3_30B_A3B))
    assert language_config_from_directory(write(tmp_path, QWEN3_30B_A3B | windows)) == plain


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "qwen3",
            {"mlp_bias": True},
            "language.mlp_bias: True cannot be stored in the config.json of the family qwen3",
        ),
        (
            "qwen3",
            {"attention": GroupedQueryAttention(num_kv_heads=2, head_dim=8)},
            "language.attention.qk_norm: False",
        ),
        ("bert", {}, "language.family: 'bert' is unknown"),
    ],
)
def test_properties_without_a_key_of_the_family_are_not_exported(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        write_language(replace(smallest_config().language, family=family, **changes))


def test_missing_yarn_keys_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    """Defaults: factor = 163840 / 4096, mscale 0, beta_fast 32, beta_slow 1."""
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "factor": None}
    language: Any = language_config_from_directory(write(tmp_path, DEEPSEEK_V3 | {"rope_scaling": rope}))
    assert language.rope.scaling == YarnConfig(factor=40.0, mscale=0.0, mscale_all_dim=0.0)


# config.json of Llama-3.2-1B-Instruct and of SmolLM2-135M as they were published.
LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "vocab_size": 49152,
}


def test_published_llama_models_are_read(tmp_path: Path) -> None:
    published = language_config_from_directory(write(tmp_path, LLAMA_3_2_1B))
    assert published == named_config("llama3.2-1b").language
    assert (published.attention.rotary_width, published.tie_embeddings, published.norm_epsilon) == (64, True, 1e-5)
    small = language_config_from_directory(write(tmp_path, SMOLLM2_135M))
    assert (small.rope, small.attention.rotary_width) == (RopeConfig(rotary_base=100000), 64)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (LLAMA_3_2_1B | {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        (LLAMA_3_2_1B | {"rope_interleaved": True}, "rope_interleaved=True is not supported, only False"),
        (LLAMA_3_2_1B | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported, only 1 is"),
        (LLAMA_3_2_1B | {"rope_scaling": {"type": "longrope"}}, "type 'longrope' .* is not supported"),
        (
            LLAMA_3_2_1B | {"rope_scaling": LLAMA_3_2_1B["rope_scaling"] | {"high_freq_factor": 0.5}},
            "config.json: high_freq_factor: must be above low_freq_factor=1.0, got 0.5",
        ),
        (
            LLAMA_3_2_1B | {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types=.* is not supported; it must be a list of full_attention",
        ),
        (LLAMA_3_2_1B | {"attention_multiplier": 2.0}, r"key 'attention_multiplier' \(2.0\) is unknown"),
        (
            QWEN3_30B_A3B | {"use_sliding_window": True, "sliding_window": 4096},
            "sliding_window=4096 is not supported, because it is narrower than max_position_embeddings=40960",
        ),
        (QWEN3_30B_A3B | {"mlp_only_layers": [0, 3]}, r"mlp_only_layers=\[0, 3\] is not supported, only \[\]"),
        (QWEN3_30B_A3B | {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported, only 1"),
        (QWEN3_30B_A3B | {"num_experts": None}, "num_experts=None is not supported; it must be an integer above 0"),
        (
            QWEN3_30B_A3B | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "type 'dynamic' .* is not supported",
        ),
        (QWEN3_30B_A3B | {"num_experts_per_tok": 200}, "config.json: experts_per_token: .*num_experts=128, got 200"),
        (DEEPSEEK_V3 | {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported, only 1"),
        (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported, only 'sigmoid'"),
        (DEEPSEEK_V3 | {"topk_method": "greedy"}, "topk_method='greedy' is not supported, only 'noaux_tc'"),
        (DEEPSEEK_V3 | {"norm_topk_prob": False}, "norm_topk_prob=False is not supported, only True"),
        (DEEPSEEK_V3 | {"rope_interleave": False}, "rope_interleave=False is not supported, only True"),
        (DEEPSEEK_V3 | {"q_lora_rank": 0}, "q_lora_rank=0 is not supported; it must be an integer above 0"),
        (DEEPSEEK_V3 | {"num_key_value_heads": 8}, "num_key_value_heads=8 is not supported, only 128"),
        (
            DEEPSEEK_V3 | {"first_k_dense_replace": -1},
            "first_k_dense_replace=-1 is not supported; it must be an integer >= 0",
        ),
        (DEEPSEEK_V3 | {"n_group": 7}, "num_expert_groups: must divide num_experts=256 .*, got 7"),
        (DEEPSEEK_V3 | {"index_topk": 2048}, r"key 'index_topk' \(2048\) is unknown"),
        (
            DEEPSEEK_V3 | {"rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"attention_factor": -2.0}},
            r"config.json: rope_scaling: attention_factor=-2.0 is not supported; it must be a number above 0",
        ),
        (
            DEEPSEEK_V3 | {"rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"bend": 2}},
            r"rope_scaling: key 'bend' \(2\) is unknown",
        ),
        (DEEPSEEK_V3 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type 'dynamic' .* is not supported"),
    ],
)
def test_unsupported_values_are_refused_with_file_and_key(
    tmp_path: Path, document: dict[str, Any], message: str
) -> None:
    with pytest.raises(WeightError, match=message) as caught:
        language_config_from_directory(write(tmp_path, document))
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_deepseek_v3_without_multi_token_prediction_weights_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As saved by transformers: config.json has num_nextn_predict_layers, but there are no tensors."""
    language = smallest_deepseek_v3().language
    assert language.num_mtp_layers == 1
    published = AutoModelForCausalLM.from_config(AutoConfig.for_model(**write_language(language)))
    published.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert language_config_from_directory(tmp_path) == replace(language, num_mtp_layers=0)
    assert language_config_from_directory(tmp_path).num_mtp_layers == 0
    assert caplog.text.count("The model is loaded without them") == 1


def test_a_whole_directory_with_another_decoder_is_refused_by_name(tmp_path: Path) -> None:
    document = hf_config(smallest_qwen3_moe(), torch.float32)
    document["text_config"]["model_type"] = "gemma"
    with pytest.raises(WeightError, match="text_config: model_type='gemma' is not supported, only qwen2"):
        config_from_directory(write(tmp_path, document))


POOL = (None, True, 0, -1, 1, 7, 2**62, 1.5, float("nan"), float("inf"), "", "x", [], [1], [[1]], {}, {"a": {}}, ["y"])


@pytest.mark.parametrize("document", [DEEPSEEK_V3, QWEN3_30B_A3B, hf_config(smallest_deepseek_v3(), torch.float32)])
def test_a_value_of_any_type_is_accepted_or_refused_in_one_sentence(tmp_path: Path, document: dict[str, Any]) -> None:
    sections: list[tuple[str, ...]] = [(), *((name,) for name, value in document.items() if isinstance(value, dict))]
    for section in sections:
        for name in document[section[0]] if section else document:
            for value in POOL:
                changed = json.loads(json.dumps(document))
                (changed[section[0]] if section else changed)[name] = value
                try:
                    language_config_from_directory(write(tmp_path, changed))
                except WeightError as error:
                    message = str(error)
                else:
                    continue
                assert message.isprintable()
                assert len(message) < len(str(tmp_path)) + 500
                assert "Remove" not in message
                assert "Change" not in message
