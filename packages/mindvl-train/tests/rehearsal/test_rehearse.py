# SPDX-License-Identifier: Apache-2.0
"""Rehearsals of tiny recipes on a CPU and on a GPU: the real step of one rank of many, in one process."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mindvl_data import DataConfig, PackingConfig, SourceConfig
from mindvl_model import LanguageConfig, VisionConfig
from mindvl_model.adapters import LoRAConfig
from mindvl_model.families.deepseek_v3 import DeepSeekV3Preset
from mindvl_model.families.qwen3 import Qwen3Preset
from mindvl_model.parallel_config import ParallelConfig, RecomputeConfig
from mindvl_train.config import ModelSection, OptimizerConfig, RunConfig, ScheduleConfig
from mindvl_train.errors import TrainError
from mindvl_train.layout_search.blocks import Kernels
from mindvl_train.layout_search.measure import Job, predict
from mindvl_train.layout_search.packs import Pack
from mindvl_train.rehearsal.job import job_of, kind_of
from mindvl_train.rehearsal.record import RankRecord
from mindvl_train.rehearsal.rehearse import prepared_environment, rehearse
from mindvl_train.resolved_run import resolve_run

VISION = VisionConfig(hidden_size=64, num_layers=2, num_heads=4, ffn_hidden_size=176, full_attention_layers=(1,))
DENSE = Qwen3Preset(
    hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, ffn_hidden_size=384, vocab_size=2000
).decoder()
EXPERTS = DeepSeekV3Preset(
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    ffn_hidden_size=384,
    vocab_size=2000,
    q_lora_rank=48,
    kv_lora_rank=32,
    nope_head_dim=32,
    rope_head_dim=16,
    value_head_dim=32,
    num_dense_layers=1,
    num_experts=8,
    experts_per_token=2,
    expert_ffn_hidden_size=96,
    num_expert_groups=4,
    groups_per_token=2,
).decoder()
PACK = Pack(segments=(256, 218, 504, 46), grids=((1, 16, 24), (1, 8, 8)))


def config_of(
    language: LanguageConfig,
    *,
    packs: int,
    parallel: ParallelConfig | None = None,
    optimizer: OptimizerConfig | None = None,
) -> RunConfig:
    """A run of a small model with a global batch of `packs`."""
    return RunConfig(
        phase="sft",
        out=Path("run"),
        data=DataConfig(
            sources=(SourceConfig(name="none", path="none"),),
            tokenizer=Path("none"),
            packing=PackingConfig(seq_length=PACK.tokens),
        ),
        model=ModelSection(vision=VISION, language=language),
        schedule=ScheduleConfig(steps=1, peak_lr=1e-4),
        global_batch_size=packs,
        parallel=parallel or ParallelConfig(),
        optimizer=optimizer or OptimizerConfig(),
    )


@pytest.fixture(scope="module")
def pipeline_rank() -> RankRecord:
    """Rank 2 of 8: tensor parallel 2, two pipeline stages, data parallel 2; the second stage has no vision encoder."""
    config = config_of(DENSE, packs=4, parallel=ParallelConfig(tp_size=2, pp_size=2))
    return rehearse(config, recipe="dense", device="cpu", world_size=8, rank=2, pack=PACK)


@pytest.mark.slow
def test_the_rank_has_its_coordinates_and_its_share_of_packs(pipeline_rank):
    place = {name: pipeline_rank.coordinates[f"{name}_rank"] for name in ("tp", "pp", "dp")}
    assert place == {"tp": 0, "pp": 0, "dp": 1}
    assert pipeline_rank.num_microbatches == 2
    assert pipeline_rank.pack == {"tokens": 1024, "patches": 448, "segments": 4}


@pytest.mark.slow
def test_activations_are_sent_to_the_same_place_of_the_next_stage(pipeline_rank):
    messages = [m for m in pipeline_rank.messages if m.step == 1 and m.kind in ("send", "recv")]
    assert {m.kind: m.peer for m in messages} == {"send": 6, "recv": 6}
    assert [m.kind for m in messages].count("send") == 2
    # 1,024 tokens, half of them on each tensor-parallel rank, hidden size 128, float32
    assert {m.num_bytes for m in messages} == {512 * 128 * 4}
    assert {m.shapes for m in messages} == {((512, 1, 128),)}


@pytest.mark.slow
def test_every_step_has_the_same_messages(pipeline_rank):
    def of_step(step: int) -> list[tuple[object, ...]]:
        return [(m.kind, m.group, m.shapes, m.peer) for m in pipeline_rank.messages if m.step == step]

    assert of_step(0)
    # only the last step reports metrics and saves
    assert of_step(1)[: len(of_step(0))] == of_step(0)


@pytest.mark.slow
def test_every_message_has_a_group_with_this_rank(pipeline_rank):
    for message in pipeline_rank.messages:
        assert 2 in pipeline_rank.groups[message.group].ranks
    names = {group.name: group.ranks for group in pipeline_rank.groups.values()}
    assert names["TENSOR_MODEL_PARALLEL_GROUP"] == (2, 3)


@pytest.mark.slow
def test_bytes_between_steps_are_those_of_weights_gradients_and_two_moments(pipeline_rank):
    held = pipeline_rank.persistent
    assert held["gradients"] == pytest.approx(held["parameters"], rel=0.01)
    # float32 weights need no master copy; two data-parallel ranks share the moments
    assert held["optimizer"] == pytest.approx(held["parameters"], rel=0.02)
    assert sum(pipeline_rank.peak.categories.values()) == pipeline_rank.peak.num_bytes > pipeline_rank.persistent_bytes


@pytest.mark.slow
def test_one_step_after_a_resume_has_the_peak_of_the_second(pipeline_rank):
    config = config_of(DENSE, packs=4, parallel=ParallelConfig(tp_size=2, pp_size=2))
    resumed = rehearse(config, recipe="dense", device="cpu", world_size=8, rank=2, steps=1, pack=PACK)
    assert resumed.peak.num_bytes == pytest.approx(pipeline_rank.peak.num_bytes, rel=0.005)


@pytest.mark.slow
def test_experts_receive_an_even_share_of_the_tokens():
    config = config_of(EXPERTS, packs=4, parallel=ParallelConfig(ep_size=4))
    record = rehearse(config, recipe="experts", device="cpu", world_size=4, rank=3, steps=1, pack=PACK)
    rows = [m for m in record.messages if m.kind == "all_to_all" and m.splits and m.phase == "compute"]
    # 1,024 tokens to 2 experts each, spread over 4 ranks
    assert {m.splits for m in rows} == {((512,) * 4, (512,) * 4)}
    assert record.coordinates["ep_rank"] == 3


@pytest.mark.slow
def test_expert_messages_of_fixed_size_have_their_capacity():
    config = config_of(EXPERTS, packs=4, parallel=ParallelConfig(ep_size=4, expert_capacity_factor=1.5))
    record = rehearse(config, recipe="experts", device="cpu", world_size=4, rank=3, steps=1, pack=PACK)
    rows = [m for m in record.messages if m.kind == "all_to_all" and m.splits and m.phase == "compute"]
    assert {m.splits for m in rows} == {((768,) * 4, (768,) * 4)}  # an even share is 512 rows


@pytest.mark.slow
def test_offloaded_moments_are_not_on_the_device():
    config = config_of(DENSE, packs=1)
    options = {"recipe": "dense", "device": "cpu", "world_size": 1, "rank": 0, "steps": 1, "pack": PACK}
    held = rehearse(config, **options)
    assert held.checkpoint is not None
    # weights and two moments, each written once by the only rank
    assert held.checkpoint.num_bytes == pytest.approx(3 * held.persistent["parameters"], rel=0.01)


def _estimate(config: RunConfig, kernels: Kernels) -> float:
    """The estimate of the layout search for the only rank of a job."""
    return predict(Job(run=resolve_run(config, 1), pack=PACK), kernels)[0].total


@pytest.mark.slow
def test_the_estimate_of_an_offloading_job_on_a_cpu_is_that_of_its_rehearsal():
    """A CPU has one memory, so offloaded moments and activations stay in it."""
    config = replace(config_of(DENSE, packs=1, optimizer=OptimizerConfig(offload=True)))
    config = replace(config, recompute=RecomputeConfig(offload_layers=2))
    record = rehearse(config, recipe="dense", device="cpu", world_size=1, rank=0, pack=PACK)
    assert record.peak.num_bytes == pytest.approx(_estimate(config, "cpu"), rel=0.03)


@pytest.mark.slow
def test_the_estimate_counts_the_logits_of_grouped_queries_in_fp32_on_a_gpu(gpu_rank):
    config = config_of(DENSE, packs=1)
    record = rehearse(config, recipe="dense", device="h100", world_size=1, rank=0, steps=1, pack=PACK)
    assert record.peak.num_bytes == pytest.approx(_estimate(config, "cuda"), rel=0.03)


@pytest.fixture(scope="module")
def gpu_rank() -> RankRecord:
    """The only rank of a job on an H100, with two packs."""
    if torch.version.cuda is None or shutil.which("cc") is None:
        pytest.skip("needs a CUDA build of torch and a C compiler")
    config = replace(config_of(DENSE, packs=2), precision="bf16")
    return rehearse(config, recipe="dense", device="h100", world_size=1, rank=0, steps=1, pack=PACK)


@pytest.mark.slow
def test_a_gpu_has_the_kernels_that_a_run_chooses_on_cuda(gpu_rank):
    triton = {name for name, backend in gpu_rank.kernels.items() if backend == "triton"}
    assert triton == {"rms_norm", "add_rms_norm", "rotary", "rotary_qkv", "swiglu"}
    counts = {name: count.count for name, count in gpu_rank.operators.items()}
    # two layers of each transformer, two packs
    for name in ("torch_attn._varlen_attn", "torch_attn._varlen_attn_backward", "mindvl.swiglu", "mindvl.rotary_qkv"):
        assert counts[f"{name}.default"] == 8
    assert counts["aten._fused_adamw_.default"] > 0
    assert gpu_rank.missing == {}


@pytest.mark.slow
def test_attention_on_a_gpu_is_counted_by_the_lengths_of_the_segments(gpu_rank):
    """Images have 384 and 64 patches, in 7 windows of 64; 4 heads of 16 and of 32; two products forward, five backward."""
    vision = 4 * 16 * (384**2 + 64**2 + 7 * 64**2)
    language = 4 * 32 * 2 * sum(length**2 for length in PACK.segments) / 2
    for name, products in (("torch_attn._varlen_attn.default", 2), ("torch_attn._varlen_attn_backward.default", 5)):
        assert gpu_rank.operators[name].flops == 2 * (2 * products) * (vision + language)


@pytest.mark.slow
def test_layers_on_a_gpu_keep_what_the_backward_passes_of_their_kernels_read(gpu_rank):
    """Two layers of 1,024 tokens in bfloat16: hidden 128, 4 heads of 32 with 2 for keys and values, 384 in the MLP."""
    held = gpu_rank.peak.categories
    assert held["activations/decoder mlp"] == 2 * 2 * 1024 * 3 * 384  # gate and up, and their product
    projection = 2 * 1024 * (4 + 2 + 2) * 32  # also kept once more, as queries, keys and values
    output, sums, random_state = 2 * 1024 * 4 * 32, 4 * 1024 * 4, 512
    bounds = 512  # of the segments, made by the first layer for all
    assert held["activations/decoder attention"] == bounds + 2 * (2 * projection + output + sums + random_state)


@pytest.mark.slow
def test_an_offloaded_layer_leaves_its_large_tensors_in_host_memory(gpu_rank):
    """Gate and up of one of two layers, 1.5 MiB; its other tensors have less than 1 MiB and stay."""
    config = replace(config_of(DENSE, packs=2), precision="bf16", recompute=RecomputeConfig(offload_layers=1))
    record = rehearse(config, recipe="dense", device="h100", world_size=1, rank=0, steps=1, pack=PACK)
    name = "activations/decoder mlp"
    assert gpu_rank.peak.categories[name] - record.peak.categories[name] == 2 * 1024 * 2 * 384


@pytest.mark.slow
def test_a_gpu_holds_weights_gradients_and_optimizer_states_of_mixed_precision(gpu_rank):
    held = gpu_rank.persistent
    assert held["gradients"] == pytest.approx(2 * held["parameters"], rel=0.01)  # float32 and bfloat16
    assert held["optimizer"] == pytest.approx(6 * held["parameters"], rel=0.01)  # float32 weights and two moments


@pytest.mark.slow
def test_the_host_waits_for_a_gpu_only_outside_the_model(gpu_rank):
    lines = [wait.source.split(":")[0] for wait in gpu_rank.waits]
    assert lines.count("mindvl_train/step_totals.py") == 1
    assert not any(line.startswith("mindvl_model") for line in lines)


def test_a_build_of_torch_without_cuda_cannot_rehearse_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    message = r"--device h100: torch: version .* was built without CUDA"
    with pytest.raises(TrainError, match=message), prepared_environment("h100"):
        pass


@pytest.mark.parametrize(
    ("device", "kind"), [("910b2", "npu"), ("h100", "cuda"), ("cpu", "cpu"), ("A100", "cuda"), ("npu", "npu")]
)
def test_the_kind_of_a_device_follows_from_its_name(device, kind):
    assert kind_of(device) == kind


def test_the_digest_is_that_of_all_ranks_of_one_job():
    jobs = [
        job_of(config_of(DENSE, packs=2), recipe="dense", device="cpu", world_size=2, rank=rank, pack=PACK)
        for rank in (0, 1)
    ]
    assert jobs[0].digest == jobs[1].digest
    assert replace(jobs[0], steps=3).digest != jobs[0].digest


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rank": 2}, "--ranks 2: does not exist among 2 ranks"),
        ({"device": "abacus"}, "--device abacus: is unknown"),
        ({"world_size": 3}, "global_batch_size: 2 is not divisible"),
    ],
)
def test_a_job_that_cannot_be_is_refused(more, message):
    options = {"recipe": "dense", "device": "cpu", "world_size": 2, "rank": 0, "pack": PACK, **more}
    with pytest.raises(TrainError, match=message):
        job_of(config_of(DENSE, packs=2), **options)


def test_quantized_weights_are_refused_on_an_npu_before_a_process_starts():
    config = replace(config_of(DENSE, packs=2), adapter=LoRAConfig(base_bits=4))
    with pytest.raises(TrainError, match=r"adapter\.base_bits: is 4, but bitsandbytes has no kernels for NPUs"):
        job_of(config, recipe="dense", device="910b2", world_size=2, rank=0, pack=PACK)
