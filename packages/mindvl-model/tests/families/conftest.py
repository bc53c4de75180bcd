# SPDX-License-Identifier: Apache-2.0
"""transformers models and MindVLModels with the same weights, through directories."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mindvl_model import MindVLConfig
from mindvl_model.counts import count_parameters
from mindvl_model.families.registry import read_language, write_language
from mindvl_model.hf.config_keys import Keys
from mindvl_model.hf.directory_config import language_config_from_directory
from mindvl_model.hf.load import load_hf_directory
from mindvl_model.parameters import named_tensors
from mindvl_model.random_inputs import RandomSegment, pack_segments, random_segment
from mindvl_model.testing.tiny import randomize, smallest_config
from mindvl_model.weights.decoder import decoder_rules
from mindvl_model.weights.directory import WeightDirectory, write_weights
from mindvl_model.weights.names import canonical_name


def published_config(config: MindVLConfig) -> Qwen3MoeConfig | DeepseekV3Config:
    """The transformers configuration of the language model."""
    language = config.language
    shared = {
        "vocab_size": language.vocab_size,
        "hidden_size": language.hidden_size,
        "intermediate_size": language.ffn_hidden_size,
        "moe_intermediate_size": language.experts.expert_ffn_hidden_size,
        "num_hidden_layers": language.num_layers,
        "num_attention_heads": language.num_heads,
        "num_experts_per_tok": language.experts.experts_per_token,
        "rms_norm_eps": language.norm_epsilon,
        "max_position_embeddings": language.max_positions,
        "tie_word_embeddings": language.tie_embeddings,
        "attn_implementation": "eager",
    }
    assert language.experts is not None
    if language.attention.kind == "grouped_query":
        return Qwen3MoeConfig(
            **shared,
            num_key_value_heads=language.attention.num_kv_heads,
            head_dim=language.attention.head_dim,
            num_experts=language.experts.num_experts,
            norm_topk_prob=language.experts.normalize_router,
            router_aux_loss_coef=language.experts.aux_loss_weight,
            rope_parameters={"rope_type": "default", "rope_theta": language.rope.rotary_base},
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": language.rope.rotary_base}
    if language.rope.scaling is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": language.rope.scaling.factor,
            "original_max_position_embeddings": language.rope.scaling.original_max_positions,
            "beta_fast": language.rope.scaling.beta_fast,
            "beta_slow": language.rope.scaling.beta_slow,
            "mscale": language.rope.scaling.mscale,
            "mscale_all_dim": language.rope.scaling.mscale_all_dim,
        }
    return DeepseekV3Config(
        **shared,
        num_key_value_heads=language.num_heads,
        q_lora_rank=language.attention.q_lora_rank,
        kv_lora_rank=language.attention.kv_lora_rank,
        qk_nope_head_dim=language.attention.nope_head_dim,
        qk_rope_head_dim=language.attention.rope_head_dim,
        v_head_dim=language.attention.value_head_dim,
        first_k_dense_replace=language.num_dense_layers,
        n_routed_experts=language.experts.num_experts,
        n_shared_experts=language.experts.num_shared_experts,
        n_group=language.experts.num_expert_groups,
        topk_group=language.experts.groups_per_token,
        routed_scaling_factor=language.experts.routed_scale,
        num_mtp_layers=language.num_mtp_layers,
        rope_parameters=rope,
    )


@pytest.fixture
def publish(tmp_path: Path) -> Callable[..., Any]:
    """The transformers model with the language weights of a MindVLModel, written and read as a directory."""

    def make(model: Any, dtype: torch.dtype = torch.float32) -> Any:
        directory = tmp_path / "published"
        directory.mkdir()
        parameters = named_tensors(model)
        rules = decoder_rules(model.mindvl.language)
        tensors = [
            (name.replace("model.language_model.", "model."), piece)
            for rule in rules
            for name, piece in zip(rule.hf_names, rule.split(parameters[rule.param_name].detach()), strict=True)
        ]
        write_weights(directory, tensors)
        config = published_config(model.mindvl)
        config.save_pretrained(directory)
        kind = Qwen3MoeForCausalLM if config.model_type == "qwen3_moe" else DeepseekV3ForCausalLM
        published, report = kind.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        assert not report["missing_keys"]
        extra = [int(name.split(".")[2]) for name in report["unexpected_keys"]]
        assert all(layer >= model.mindvl.language.num_layers for layer in extra), report  # multi-token prediction
        return published.train()

    return make


@pytest.fixture
def published_gradients(tmp_path: Path) -> Callable[[Any, MindVLConfig], dict[str, Tensor]]:
    """Gradients of the transformers model under the parameter names of MindVLModel, converted by the weight rules."""

    def take(published: Any, config: MindVLConfig) -> dict[str, Tensor]:
        for parameter in published.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        published.save_pretrained(tmp_path / "gradients")
        directory = WeightDirectory(tmp_path / "gradients")
        assert json.loads((tmp_path / "gradients" / "config.json").read_text())["model_type"] == directory.model_type
        stored = {canonical_name(name): name for name in directory.names()}
        taken = {}
        for rule in decoder_rules(config.language):
            taken[rule.param_name] = rule.join([directory.read(stored.pop(name)) for name in rule.hf_names])
        assert not stored  # every tensor of the directory belongs to a parameter
        return taken

    return take


def assert_near_in_bf16(model: Any, published: Any, segment: RandomSegment) -> None:
    """Check that logits differ by 0.005 of their scale in the mean, and that most tokens have the same experts.

    Rounding to 16 bits can change the experts of a token with nearly equal scores, so logits of such tokens are ignored.
    """
    from mindvl_model.megatron.router import record_routing

    hf_experts: list[Tensor] = []
    for name, module in published.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, __, output: hf_experts.append(output[2]))
    expected = published(segment.input_ids[None]).logits[0].float()
    with record_routing(model) as recorded:
        logits = model.logits(**pack_segments([segment])).float()
    choices = [
        torch.cat([one.sort(dim=1).values for one in lists], dim=1) for lists in (chain(*recorded.values()), hf_experts)
    ]
    agree = (choices[0] == choices[1]).all(dim=1)
    assert agree.float().mean() >= 0.9
    assert (logits - expected)[agree].abs().mean() <= 0.005 * expected.abs().max()


@pytest.fixture
def near_in_bf16() -> Callable[..., None]:
    return assert_near_in_bf16


def segment_losses(logits: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
    """Summed cross entropy of segments that were run alone."""
    pairs = zip(logits, labels, strict=True)
    return torch.stack([torch.nn.functional.cross_entropy(one, label, reduction="sum") for one, label in pairs]).sum()


@pytest.fixture
def losses() -> Callable[..., Tensor]:
    return segment_losses


@pytest.fixture
def assert_segment_parity(
    make_model: Callable[..., Any], publish: Callable[..., Any], published_gradients: Callable[..., dict[str, Tensor]]
) -> Callable[[MindVLConfig], None]:
    """Check logits and every gradient of packed segments of 7, 1 and 50 tokens, whose auxiliary loss is off."""

    def check(config: MindVLConfig) -> None:
        model = make_model(config)
        published = publish(model)
        segments = [random_segment(config, num_text=length, seed=length) for length in (7, 1, 50)]
        pack = pack_segments(segments, padding=3)
        logits = model.logits(**pack)
        expected = [published(segment.input_ids[None]).logits[0] for segment in segments]
        scale = torch.cat(expected).abs().max()
        assert (logits[:-3] - torch.cat(expected)).abs().max() <= 1e-4 * scale

        model(**pack).backward()
        segment_losses(expected, [segment.labels for segment in segments]).backward()
        hf_gradients = published_gradients(published, config)
        for name, parameter in model.language.named_parameters(prefix="language"):
            wanted = hf_gradients.pop(name)
            assert (wanted - parameter.grad).abs().max() <= 1e-4 * wanted.abs().max(), name
        assert all(name.endswith("expert_bias") for name in hf_gradients)  # every parameter was compared

    return check


@pytest.fixture
def assert_published_parity(
    make_model: Callable[..., Any], published_gradients: Callable[..., dict[str, Tensor]], tmp_path: Path
) -> Callable[[Any], None]:
    """Check a family on a directory that transformers saves: logits, every gradient, and the configuration both ways."""

    def from_config(published_config: Any) -> Any:
        return AutoModelForCausalLM.from_config(
            published_config, attn_implementation="eager", experts_implementation="eager"
        )

    def check(published_config: Any) -> None:
        published = from_config(published_config)
        randomize(published)
        published.save_pretrained(tmp_path / "published")
        language = language_config_from_directory(tmp_path / "published")
        config = replace(smallest_config(vocab_size=language.vocab_size), language=language)
        model = make_model(config, seed=9)
        load_hf_directory(model, config, tmp_path / "published", ["language"])

        segments = [random_segment(config, num_text=length, seed=length) for length in (7, 1, 90)]
        pack = pack_segments(segments, padding=3)
        expected = [published(segment.input_ids[None]).logits[0] for segment in segments]
        scale = torch.cat(expected).abs().max()
        assert (model.logits(**pack)[:-3] - torch.cat(expected)).abs().max() <= 1e-4 * scale
        model(**pack).backward()
        segment_losses(expected, [segment.labels for segment in segments]).backward()
        counts = count_parameters(config)
        assert counts.language == sum(parameter.numel() for parameter in published.parameters())

        document = write_language(language)
        assert read_language(language.family, Keys(document, "config.json"), Keys(document, "config.json")) == language
        again = from_config(AutoConfig.for_model(**document))
        again.load_state_dict(published.state_dict())
        torch.testing.assert_close(again(segments[0].input_ids[None]).logits[0], expected[0])

        gradients = published_gradients(published, config)  # replaces the weights
        for name, parameter in model.language.named_parameters(prefix="language"):
            wanted = gradients.pop(name)
            assert (parameter.grad - wanted).abs().max() <= 1e-4 * wanted.abs().max(), name
        assert all(name.endswith("expert_bias") for name in gradients)  # every parameter was compared

    return check
