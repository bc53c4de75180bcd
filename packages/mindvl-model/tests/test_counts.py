# SPDX-License-Identifier: Apache-2.0
"""Parameter counts equal those of the model on the meta device and the published ones."""

import json
from collections import Counter

import pytest
import torch

from mindvl_model import MindVLConfig, named_config
from mindvl_model.counts import Counts, count_parameters
from mindvl_model.sizes import NAMED_SIZES
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_llama, smallest_qwen3_moe

BUILT = NAMED_SIZES | {
    "smallest": smallest_config(tie_embeddings=True),
    "smallest llama": smallest_llama(attention_bias=True, mlp_bias=True),
    "smallest qwen3_moe": smallest_qwen3_moe(),
    "smallest deepseek_v3": smallest_deepseek_v3(num_mtp_layers=2, num_shared_experts=2),
    "whole queries": smallest_deepseek_v3(q_lora_rank=None),
}


def part_of(name: str) -> str:
    """The field of Counts for a parameter, by its name."""
    if not name.startswith("language."):
        return name.split(".")[0]
    places = {
        ".mtp.": "mtp",
        "word_embeddings": "embedding",
        "output_layer": "head",
        "self_attention": "attention",
        "router": "router",
        "shared_experts": "shared_experts",
        ".experts.": "experts",
        ".mlp.": "dense_mlp",
        "layernorm": "norms",
    }
    return next(part for piece, part in places.items() if piece in name)


def built(config: MindVLConfig) -> Counter[str]:
    """Parameters by part of the model on the meta device."""
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_model.model import MindVLModel

    with torch.device("meta"):
        model = MindVLModel(config, BuildConfig())
    sizes: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        assert parameter.is_meta, name
        sizes[part_of(name)] += parameter.numel()
    return sizes


@pytest.mark.parametrize("name", sorted(BUILT))
def test_every_part_is_as_large_as_that_of_the_model_built_on_the_meta_device(name: str) -> None:
    counts = count_parameters(BUILT[name])
    fields = vars(counts).copy()
    del fields["active_experts"]
    assert {part: size for part, size in fields.items() if size} == dict(built(BUILT[name]))


@pytest.mark.parametrize(
    ("name", "published"),  # parameters of the safetensors files on each model's page
    [
        ("qwen2.5-vl-3b", 3_754_622_976),
        ("qwen2.5-vl-7b", 8_292_166_656),
        ("qwen2.5-vl-32b", 33_452_718_336),
        ("qwen2.5-vl-72b", 73_410_777_344),
    ],
)
def test_whole_qwen2_5_vl_has_the_published_number_of_parameters(name: str, published: int) -> None:
    assert count_parameters(named_config(name)).total == published


def test_the_language_model_of_mindvl_8b_is_the_published_qwen3_8b() -> None:
    assert count_parameters(named_config("mindvl-8b")).language == 8_190_735_360


def test_deepseek_v3_has_671b_of_which_37b_are_activated_and_its_mtp_module_14b_on_disk() -> None:
    """Published with the weights: 671B, 36.7B activated; MTP 11.5B, or 14B with its copies on disk."""
    counts = count_parameters(named_config("mindvl-671b-a37b"))
    assert round(counts.language / 1e9) == 671
    assert counts.activated / 1e9 == pytest.approx(36.7, abs=0.1)
    assert counts.mtp / 1e9 == pytest.approx(11.5, abs=0.15)
    assert (counts.mtp + counts.embedding + counts.head) / 1e9 == pytest.approx(14, abs=0.6)
    assert counts.embedding / 1e9 == pytest.approx(0.9, abs=0.05)


def test_the_vision_transformer_of_qwen2_5_vl_is_two_thirds_of_a_billion_with_its_merger() -> None:
    counts = count_parameters(named_config("qwen2.5-vl-7b"))
    assert (counts.vision + counts.projector) / 1e9 == pytest.approx(0.67, abs=0.01)
    assert counts.vision / 1e9 == pytest.approx(0.63, abs=0.01)


def test_a_token_meets_all_of_a_dense_model_and_its_share_of_the_experts() -> None:
    dense, tied = count_parameters(smallest_config()), count_parameters(smallest_config(tie_embeddings=True))
    assert dense.activated == dense.language - 64 * 24  # the table of 64 tokens, 24 wide, is only looked up
    assert tied.activated == tied.language == dense.activated
    sparse = count_parameters(smallest_qwen3_moe())  # 2 of 8 experts
    assert sparse.active_experts * 4 == sparse.experts
    assert sparse.language - sparse.embedding - sparse.activated == sparse.experts * 3 // 4


def test_counts_go_into_json_with_their_sums() -> None:
    counts = count_parameters(smallest_deepseek_v3())
    document = json.loads(json.dumps(counts.as_dict()))
    assert document["total"] == document["vision"] + document["projector"] + document["language"] + document["mtp"]
    assert Counts(**{name: document[name] for name in vars(counts)}) == counts
