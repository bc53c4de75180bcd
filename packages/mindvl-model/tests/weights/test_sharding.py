# SPDX-License-Identifier: Apache-2.0
"""Each rank of a parallel layout reads its blocks of a directory; together they hold the weights of one process."""

import pickle
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mindvl_model import WeightError
from mindvl_model.config import MindVLConfig
from mindvl_model.parameters import initialize, named_tensors
from mindvl_model.testing.layouts import join
from mindvl_model.testing.ranks import run_ranks
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen3_moe
from mindvl_model.weights.directory import WeightDirectory, write_weights
from mindvl_model.weights.names import weight_rules
from mindvl_model.weights.rules import same
from mindvl_model.weights.sharding import Block, Share, blocks, split_kind

pytestmark = pytest.mark.slow

WORKER = """
    import pickle, sys
    from pathlib import Path

    from mindvl_model import set_up_device
    set_up_device()
    from mindvl_model.hf.load import load_hf_directory
    from mindvl_model.megatron.one_step import launched_process, parallel_groups, pieces
    from mindvl_model.megatron.stages import build_stages
    from mindvl_model.parallel_config import BuildConfig, ParallelConfig
    from mindvl_model.parameters import initialize, named_tensors

    results = []
    with launched_process() as rank:
        for config, directory, sizes in pickle.loads(Path(sys.argv[1]).read_bytes()):
            parallel = ParallelConfig(**sizes)
            with parallel_groups(parallel):
                for model in build_stages(config, BuildConfig(parallel=parallel)):
                    report = load_hf_directory(model, config, directory)
                    held = sum(tensor.nbytes for tensor in named_tensors(model).values())
                    loaded = pickle.dumps(pieces(model))  # now: they share memory with the model
                    initialize(model, config, seed=5)
                    results.append((pickle.loads(loaded), report.bytes_read, held, pieces(model)))
    Path(f"{sys.argv[1]}.{rank}").write_bytes(pickle.dumps(results))
"""

TIED = smallest_config(tie_embeddings=True)
CASES: dict[str, tuple[MindVLConfig, dict[str, Any]]] = {
    "tp2": (TIED, {"tp_size": 2}),
    "tp2, images spread": (TIED, {"tp_size": 2, "spread_images": True}),
    "pp2, uneven": (TIED, {"pp_size": 2, "stage_layers": (0, 2)}),
    "pp2 vpp2": (replace(TIED, language=replace(TIED.language, num_layers=4)), {"pp_size": 2, "virtual_stages": 2}),
    "tp2 ep2, experts of Qwen3": (smallest_qwen3_moe(), {"tp_size": 2, "ep_size": 2}),
    "tp2 ep2, DeepSeek-V3": (smallest_deepseek_v3(num_mtp_layers=1), {"tp_size": 2, "ep_size": 2}),
    "tp2, whole queries": (smallest_deepseek_v3(q_lora_rank=None), {"tp_size": 2}),
    "pp2 ep1, DeepSeek-V3": (smallest_deepseek_v3(num_layers=4, num_mtp_layers=1), {"pp_size": 2}),
}


def write_directory(model: Any, directory: Path) -> Path:
    directory.mkdir()
    held = named_tensors(model)
    write_weights(
        directory,
        (
            pair
            for rule in weight_rules(model.mindvl)
            for pair in zip(rule.hf_names, rule.split(held[rule.param_name].detach()), strict=True)
        ),
    )
    (directory / "config.json").write_text('{"model_type": "mindvl"}')
    return directory


def run_two(job: Path) -> list[list[Any]]:
    run_ranks(["-c", textwrap.dedent(WORKER), str(job)], 2, timeout_s=400)
    return [pickle.loads(Path(f"{job}.{rank}").read_bytes()) for rank in range(2)]


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.multi
def test_two_ranks_read_their_shards_of_the_model_and_initialize_like_one_process(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    from mindvl_model.megatron.one_step import pieces

    jobs, expected, fresh = [], [], []
    for number, (config, sizes) in enumerate(CASES.values()):
        model = make_model(config, seed=number)
        expected.append(join([pieces(model)]))
        jobs.append((config, write_directory(model, tmp_path / str(number)), sizes))
        initialize(model, config, seed=5)
        fresh.append(join([pieces(model)]))
    (tmp_path / "job").write_bytes(pickle.dumps(jobs))
    first, second = (iter(results) for results in run_two(tmp_path / "job"))
    for (name, (config, sizes)), weights, (_, directory, _) in zip(CASES.items(), expected, jobs, strict=True):
        stages = [[next(rank) for _ in range(sizes.get("virtual_stages", 1))] for rank in (first, second)]
        assert_equal(join([held for rank in stages for held, _, _, _ in rank]), weights)
        assert_equal(join([held for rank in stages for _, _, _, held in rank]), fresh.pop(0))
        stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        for rank in stages:
            read, held = (sum(numbers) for numbers in zip(*((read, held) for _, read, held, _ in rank), strict=True))
            if config.language.family == "deepseek_v3":
                assert held <= read < stored, name  # its directory repeats embedding and head
            else:
                assert read == held < stored, name


def test_a_rank_takes_its_query_heads_from_each_third_of_the_vision_encoder_s_joint_matrix() -> None:
    rule = next(
        rule for rule in weight_rules(TIED) if rule.param_name.endswith("layers.0.self_attention.linear_qkv.weight")
    )
    ((_, block),) = blocks(rule, Share(tp_rank=1, tp_size=2))
    assert block is not None
    assert block.ranges(48) == [(8, 16), (24, 32), (40, 48)]  # two heads of 8, three times


def test_cuts_are_those_of_megatron_core() -> None:
    prefix = "language.decoder.layers.3."
    assert split_kind(prefix + "self_attention.linear_qkv.bias") == "rows"
    assert split_kind("language.embedding.word_embeddings.weight") == "rows"
    assert split_kind("projector.fc2.weight") == "columns"
    assert split_kind("projector.fc2.bias") == "whole"
    assert split_kind(prefix + "mlp.experts.linear_fc2.weight") == "experts"
    assert split_kind(prefix + "mlp.shared_experts.linear_fc2.weight") == "columns"
    assert split_kind(prefix + "self_attention.linear_kv_down_proj.weight") == "whole"


def test_a_rank_has_consecutive_experts() -> None:
    config = smallest_qwen3_moe()
    rule = next(rule for rule in weight_rules(config) if rule.param_name.endswith("0.mlp.experts.linear_fc2.weight"))
    taken = [name.split("experts.")[1] for name, block in blocks(rule, Share(ep_rank=1, ep_size=4)) if block is None]
    assert taken == ["2.down_proj.weight", "3.down_proj.weight"]
    with pytest.raises(WeightError, match="8 tensors cannot be split over ep_size=3"):
        blocks(rule, Share(ep_size=3))


def test_a_tensor_that_cannot_be_spread_is_named_with_its_file(tmp_path: Path) -> None:
    write_weights(tmp_path, [("lm_head.weight", torch.zeros(5, 2))])
    (tmp_path / "config.json").write_text("{}")
    ((name, block),) = blocks(same("language.output_layer.weight", "lm_head.weight"), Share(tp_size=2))
    with pytest.raises(WeightError, match=r"model.safetensors: tensor 'lm_head.weight' \[5, 2\] cannot be split"):
        WeightDirectory(tmp_path).read(name, block)
    assert WeightDirectory(tmp_path).read(name, Block(1, 1, 2)).shape == (5, 1)
