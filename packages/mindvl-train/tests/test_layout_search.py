# SPDX-License-Identifier: Apache-2.0
"""What blocks cost, where the schedule holds most, what a search finds; layout_search/test_measure.py has measured peaks."""

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from mindvl_model import MindVLConfig, ModelError, named_config
from mindvl_model.counts import count_parameters
from mindvl_model.flops import pack_flops
from mindvl_model.parallel_config import ParallelConfig, RecomputeConfig, check_parallel
from mindvl_model.parameters import PARTS
from mindvl_model.testing.tiny import (
    smallest_config,
    smallest_deepseek_v3,
    smallest_llama,
    smallest_qwen2_5_vl,
    smallest_qwen3_moe,
    smallest_qwen3_vl,
)
from mindvl_train.devices import find_device
from mindvl_train.layout_search import BUDGETS, Machine, Request, Task, days, evaluate, largest_pixels, room, search
from mindvl_train.layout_search.attention import Heads, attention_core, padded_size
from mindvl_train.layout_search.blocks import Block, Kernels, Setting, joined
from mindvl_train.layout_search.decoder import head_block
from mindvl_train.layout_search.memory import Ledger, _with_recomputation, recomputed, schedule, stretch_of
from mindvl_train.layout_search.packs import Pack, typical_pack
from mindvl_train.layout_search.search import layouts, remedies, spreads, with_stage_layers
from mindvl_train.layout_search.stages import Parts, balanced_counts, parts_of

FAMILIES = {
    "qwen3": smallest_config(),
    "tied": smallest_config(tie_embeddings=True),
    "qwen2": smallest_qwen2_5_vl(),
    "llama": smallest_llama(attention_bias=True, mlp_bias=True),
    "qwen3_moe": smallest_qwen3_moe(),
    "qwen3_vl": smallest_qwen3_vl(),
    "deepseek_v3": smallest_deepseek_v3(),
    "mindvl-671b-a37b": named_config("mindvl-671b-a37b"),
}
KERNELS: tuple[Kernels, ...] = ("npu", "cpu")
PACK = Pack(segments=(40, 24), grids=((1, 8, 8), (1, 4, 6)))


def _blocks(parts: Parts) -> list[Block]:
    counted = [run for chunk in parts.chunks((len(parts.layers),)) for run in chunk.runs]
    return [block for block, count in counted for _ in range(count)]


def _machine(num_devices: int = 64) -> Machine:
    device = find_device("910b2")
    assert device is not None
    return Machine(device=device, num_devices=num_devices)


def _task(model: MindVLConfig) -> Task:
    return Request(model=model, machine=_machine()).task()


def _request(name: str = "mindvl-8b", num_devices: int = 64) -> Request:
    return Request(model=named_config(name), machine=_machine(num_devices))


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_hold_every_parameter_of_the_model_once(name: str) -> None:
    model = FAMILIES[name]
    blocks = _blocks(parts_of(Setting(model=model, pack=PACK)))
    assert sum(block.dense + block.experts for block in blocks) == count_parameters(model).total


@pytest.mark.parametrize("trained", [PARTS, ("projector",), ("language",), ("projector", "language")])
@pytest.mark.parametrize("name", FAMILIES)
def test_operations_of_the_blocks_are_those_of_the_model(name: str, trained: tuple[str, ...]) -> None:
    model = FAMILIES[name]
    blocks = _blocks(parts_of(Setting(model=model, pack=PACK, trained=trained)))  # type: ignore[arg-type]
    exact = pack_flops(model, PACK.segments, PACK.grids, trainable=trained)  # type: ignore[arg-type]
    assert sum(block.matmul + block.attention for block in blocks) == pytest.approx(exact.forward, rel=1e-12)
    assert sum(block.backward_matmul + block.backward_attention for block in blocks) == pytest.approx(
        exact.backward, rel=1e-12
    )


def test_ranks_of_a_layout_share_parameters_and_operations() -> None:
    model, whole = named_config("mindvl-671b-a37b"), Setting(model=named_config("mindvl-671b-a37b"), pack=PACK)
    (one,), (two,) = (
        [block for block in parts_of(setting).layers[-1:]] for setting in (whole, replace(whole, tp_size=2, ep_size=8))
    )
    assert two.experts == one.experts // 8
    assert one.dense / 2 < two.dense < one.dense  # down-projections and norms stand on every rank
    assert two.matmul < one.matmul
    assert model.language.num_layers == len(parts_of(whole).layers)


def test_parts_that_are_not_trained_keep_less_and_the_vision_encoder_nothing() -> None:
    model = smallest_config()
    everything, projector = (
        parts_of(Setting(model=model, pack=PACK, trained=trained)) for trained in (PARTS, ("projector",))
    )
    assert sum(block.kept for block, _ in projector.before if block.part == "vision") == 0
    assert 0 < projector.layers[0].kept < everything.layers[0].kept


# Peaks of tensors in GB of pipeline ranks, from `mindvl rehearse` of the published recipes with torch_npu 2.13.
WARMUP_8B = ("mindvl-8b", 128, ("projector",), "none", {0: 46.98, 1: 44.27})
WARMUP_671B = ("mindvl-671b-a37b", 512, ("projector",), "full", {1: 15.14})
KEPT_671B = ("mindvl-671b-a37b", 512, ("projector",), "none", {1: 168.10})
LEARNED_671B = ("mindvl-671b-a37b", 512, PARTS, "none", {1: 242.47})
LAYOUTS = {
    "mindvl-8b": ParallelConfig(pp_size=2, virtual_stages=4, stage_layers=(5, 5, 4, 5, 4, 5, 4, 4)),
    "mindvl-671b-a37b": ParallelConfig(
        tp_size=2,
        pp_size=4,
        virtual_stages=4,
        stage_layers=(4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 3, 4, 4, 3),
        ep_size=128,
        spread_images=True,
    ),
}


@pytest.mark.parametrize("case", [WARMUP_8B, WARMUP_671B, KEPT_671B, LEARNED_671B])
def test_estimates_are_within_3_percent_of_rehearsed_peaks(case: tuple[Any, ...]) -> None:
    name, num_devices, trained, kind, peaks = case
    request = replace(_request(name, num_devices), max_pixels=3211264, trained=trained)
    task = replace(request.task(), expert_imbalance=1.0)
    memory = evaluate(task, LAYOUTS[name], RecomputeConfig(kind=kind)).memory
    for rank, peak in peaks.items():
        assert (memory[rank].total - memory[rank].base) / 1e9 == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize(("kind", "peaks"), [("full", {0: 39.32, 1: 34.23}), ("none", {0: 184.07, 1: 77.15})])
def test_estimates_for_gpus_are_within_1_percent_of_rehearsed_peaks(kind: Any, peaks: dict[int, float]) -> None:
    """Peaks of `mindvl rehearse recipes/mindvl-8b/multitask.yaml --device h100 --devices 128`, with the Triton kernels."""
    device = find_device("h100")
    assert device is not None
    machine = Machine(device=device, num_devices=128)
    task = replace(_request("mindvl-8b", 128), machine=machine, max_pixels=3211264, max_patches=21632).task()
    layout = replace(LAYOUTS["mindvl-8b"], stage_layers=(4, 6, 4, 5, 4, 5, 3, 5))
    memory = evaluate(task, layout, RecomputeConfig(kind=kind)).memory
    for rank, peak in peaks.items():
        assert (memory[rank].total - memory[rank].base) / 1e9 == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize(("factor", "peak"), [(None, 37.50), (2.0, 39.90)])
def test_estimates_with_padding_rows_are_within_3_percent_of_rehearsed_peaks(factor: float | None, peak: float) -> None:
    """`mindvl rehearse recipes/mindvl-671b-a37b/multitask.yaml --devices 1024 --ranks 256 global_batch_size=512`."""
    name = "mindvl-671b-a37b"
    request = replace(_request(name, 1024), max_pixels=3211264, trained=PARTS, global_batch_size=512)
    layout = replace(LAYOUTS[name], expert_capacity_factor=factor)
    task = replace(request.task(), expert_imbalance=1.0)
    memory = evaluate(task, layout, RecomputeConfig(kind="full")).memory[1]
    assert (memory.total - memory.base) / 1e9 == pytest.approx(peak, rel=0.03)


def test_padding_rows_of_expert_messages_are_stored_and_sent_but_not_multiplied() -> None:
    setting = Setting(model=smallest_deepseek_v3(), pack=PACK, ep_size=2)
    exact, blocks = (parts_of(replace(setting, expert_capacity_factor=factor)).layers[1] for factor in (None, 1.5))
    assert blocks.sent.ep == 1.5 * exact.sent.ep
    assert (blocks.matmul, blocks.attention, blocks.experts) == (exact.matmul, exact.attention, exact.experts)
    assert blocks.elementwise > exact.elementwise
    # Two experts of a token; half as many rows again.
    rows, hidden = PACK.tokens * 2, setting.model.language.hidden_size
    values = setting.wide * rows * (3 * hidden + 3 * setting.model.language.experts.expert_ffn_hidden_size) // 2
    assert blocks.routed - exact.routed == values + 16 * rows // 2 + setting.wide * PACK.tokens * 1.5 * hidden


def test_a_search_uses_the_capacity_of_the_recipe_where_experts_are_on_several_ranks() -> None:
    request = replace(_request("mindvl-671b-a37b", 512), expert_capacity_factor=1.5)
    layouts_of_ep = [spreads(request.task(), ParallelConfig(tp_size=2, ep_size=size)) for size in (1, 8)]
    assert [{layout.expert_capacity_factor for layout in found} for found in layouts_of_ep] == [{None}, {1.5}]


def test_experts_that_are_not_trained_keep_neither_their_rows_nor_the_inputs_of_their_second_matrix() -> None:
    """[rows, H] and [rows, F] of each layer, and the norm of the tokens for the shared expert and attention."""
    model = smallest_deepseek_v3()
    language = model.language
    assert language.experts is not None
    everything, projector = (
        parts_of(Setting(model=model, pack=PACK, trained=trained, ep_size=2)).layers[1]
        for trained in (PARTS, ("projector",))
    )
    rows = PACK.tokens * language.experts.experts_per_token
    values = rows * (language.hidden_size + language.experts.expert_ffn_hidden_size)
    assert everything.routed - projector.routed == 2 * values


def test_virtual_stages_receive_two_tensors_in_advance_and_later_chunks_make_their_own_angles() -> None:
    model = smallest_config()
    setting = Setting(model=model, pack=PACK)
    parts = parts_of(setting)
    plain, virtual = (ParallelConfig(pp_size=2, virtual_stages=stages) for stages in (1, 2))
    first, *_, last = parts.chunks((1,) * len(parts.layers))
    received, angles = 2 * 64 * model.language.hidden_size, 2 * 4 * 64 * model.language.attention.head_dim
    ledger = Ledger(setting)
    for chunk in (first, last):
        one, more = (ledger._stretch(chunk, parallel, RecomputeConfig()) for parallel in (plain, virtual))
        assert more.backward_peak - one.backward_peak == 2 * received
    assert ledger._stretch(last, plain, RecomputeConfig()).kept == stretch_of(last.runs).kept + angles


def test_messages_between_stages_carry_the_deepstack_features_of_later_layers() -> None:
    """Two features, added after layers 1 and 2 of 3: messages carry the second if the first stage has one layer."""
    model = smallest_qwen3_vl()
    setting = Setting(model=model, pack=PACK)
    parts, ledger = parts_of(setting), Ledger(setting)
    tensor = 2 * 64 * model.language.hidden_size
    carried, plain = (ParallelConfig(pp_size=2, stage_layers=counts) for counts in ((1, 2), (2, 1)))
    chunks = parts.chunks((1, 2))
    # The sender keeps the message, the receiver the features; gradients of output and input have the same shape.
    for chunk in chunks:
        more, less = (ledger._stretch(chunk, parallel, RecomputeConfig()) for parallel in (carried, plain))
        assert (more.kept - less.kept, more.backward_peak - less.backward_peak) == (tensor, 2 * tensor)
    whole = replace(_task(model), machine=_machine(2))
    times = [evaluate(whole, parallel, RecomputeConfig()).time.pp for parallel in (carried, plain)]
    assert times[0] == pytest.approx(2 * times[1])


def test_a_typical_pack_has_whole_images_up_to_its_visual_tokens() -> None:
    vision = named_config("mindvl-8b").vision
    pack = typical_pack(8192, max_pixels=1280 * 784, vision=vision, visual_tokens=4000, segment_tokens=2048)
    assert pack.segments == (2048,) * 4
    assert len(pack.grids) == 4
    assert 3600 < pack.patches // 4 <= 4000
    assert typical_pack(64, max_pixels=784, vision=vision, visual_tokens=0).grids == ()


def test_attention_keeps_padded_copies_where_no_kernel_takes_the_pack_as_it_is() -> None:
    heads = Heads(query=4, key=2, width=8, value=8)
    npu, cpu = (
        attention_core(Setting(model=smallest_config(), pack=PACK, kernels=kernels), (40, 24), heads)
        for kernels in KERNELS
    )
    assert npu.holds_values
    assert npu.kept == 2 * 64 * 6 * 8 + 64 * 4 * 64  # queries and keys; sums eight times
    assert not cpu.holds_values
    assert cpu.kept == 2 * 2 * 64 * 6 * 8 + 4 * 64 * 4
    assert padded_size((40, 39, 8)) == (88, False)
    assert padded_size((32, 32)) == (64, True)


def test_blocks_in_a_pack_are_fullest_where_the_sum_is() -> None:
    blocks = [
        Block(name=str(kept), part="language", kept=kept, forward_peak=forward, backward_peak=backward)
        for kept, forward, backward in ((10.0, 14.0, 3.0), (20.0, 25.0, 1.0))
    ]
    both = joined("both", blocks)
    stretch = stretch_of([(block, 1) for block in blocks])
    assert (both.kept, both.forward_peak) == (30.0, 35.0)
    assert both.kept + both.backward_peak == 31.0
    assert (stretch.kept, stretch.forward_peak, stretch.backward_peak) == (30.0, 35.0, 31.0)


def test_a_recomputed_layer_keeps_its_input_and_needs_the_rest_in_backward() -> None:
    layer = Block(name="layer", part="language", kept=50.0, boundary=5.0, forward_peak=60.0, backward_peak=20.0)
    again = recomputed(layer)
    assert (again.kept, again.backward_peak) == (5.0, 70.0)


def test_a_start_that_needs_more_than_a_step_is_the_peak() -> None:
    """Qwen3-VL-4B on 64 devices: a second copy of its weights, 8.88 GB, is more than activations and optimizer."""
    request = Request(model=named_config("qwen3-vl-4b"), machine=_machine(), global_batch_size=128)
    memory = evaluate(request.task(), ParallelConfig(), RecomputeConfig(kind="full")).memory[0]
    assert memory.total - memory.base == pytest.approx(35.51e9, rel=0.001)  # rehearsed with torch_npu 2.13
    assert memory.total - memory.base == pytest.approx(2 * memory.parameters + memory.gradients)


def test_the_vision_encoder_is_recomputed_with_any_number_of_language_layers() -> None:
    task, parallel = _request().task(), ParallelConfig(spread_images=False)
    setting = Setting(model=task.model, pack=task.full_pack)
    chunk, *_ = parts_of(setting).chunks((36,))
    kept = [
        stretch_of(_with_recomputation(chunk, RecomputeConfig(kind="full", layers=layers), setting)).kinds["vision"]
        for layers in (None, 1)
    ]
    assert kept[0] == kept[1] < chunk.before[1][0].kept * 2
    seconds = [
        evaluate(task, parallel, RecomputeConfig(kind="full", layers=layers)).time.recompute
        for layers in (34, 35, None)
    ]
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])  # one layer each


def test_the_loss_needs_no_more_than_two_float32_copies_of_few_logits() -> None:
    model = named_config("mindvl-8b")
    head = head_block(Setting(model=model, pack=Pack(segments=(1000,), grids=(), num_loss_tokens=16)))
    assert head.forward_peak - head.kept == 2 * 4 * 16 * model.language.vocab_size


@pytest.mark.parametrize(("rank", "in_flight"), [(0, 4), (1, 3), (3, 1)])
def test_a_stage_holds_the_packs_that_are_further_on(rank: int, in_flight: int) -> None:
    held = most = 0
    for forward, _ in schedule(4, 1, rank, 16):
        held += 1 if forward else -1
        most = max(most, held)
    assert most == in_flight
    assert held == 0


def test_interleaved_stages_hold_more_and_every_chunk_goes_back_as_often_as_forward() -> None:
    steps = schedule(2, 2, 0, 8)
    forward, backward = (Counter(chunk for is_forward, chunk in steps if is_forward == way) for way in (True, False))
    assert forward == backward
    held = most = 0
    for is_forward, _ in steps:
        held += 1 if is_forward else -1
        most = max(most, held)
    assert most == 5  # megatron-core: 2 * (pp - 1) + (virtual - 1) * pp forward passes first, then one more


def test_layers_go_where_stages_are_cheap() -> None:
    parts = parts_of(Setting(model=named_config("mindvl-8b"), pack=PACK))
    counts = balanced_counts(parts, ParallelConfig(pp_size=4), lambda block: 1.0 if block in parts.layers else 2.0)
    assert counts is not None
    assert sum(counts) == 36
    assert counts[0] < counts[1]  # 32 layers of the vision encoder before it
    assert balanced_counts(parts, ParallelConfig(pp_size=64), lambda block: 1.0) is None


def test_more_data_parallel_ranks_share_the_optimizer_and_offloading_leaves_the_master() -> None:
    setting = Setting(model=named_config("mindvl-8b"), pack=PACK)
    ledger, parallel = Ledger(setting), ParallelConfig()
    chunks = parts_of(setting).chunks((36,))

    def optimizer(dp_size: int, *, offload: bool) -> float:
        return ledger.rank(
            parallel, RecomputeConfig(), chunks, pp_rank=0, dp_size=dp_size, num_microbatches=1, offload=offload
        ).optimizer

    total = count_parameters(setting.model).total
    assert optimizer(1, offload=False) == 12 * total
    assert optimizer(8, offload=False) == 12 * total / 8
    assert optimizer(8, offload=True) == 4 * total / 8


def test_on_a_cpu_what_is_offloaded_stays_in_the_memory_of_the_rank() -> None:
    setting = Setting(model=named_config("mindvl-8b"), pack=PACK, kernels="cpu")
    away = RecomputeConfig(offload_layers=9)
    plain, offloaded = (
        Ledger(setting).rank(
            ParallelConfig(),
            recompute,
            parts_of(setting).chunks((36,)),
            pp_rank=0,
            dp_size=1,
            num_microbatches=1,
            offload=recompute is away,
        )
        for recompute in (RecomputeConfig(), away)
    )
    assert offloaded.optimizer == plain.optimizer
    assert offloaded.activations == plain.activations
    assert offloaded.host == 0


def test_layers_with_small_tensors_keep_them_on_the_device() -> None:
    pack = Pack(segments=(64,), grids=())  # hidden states of 64 x 4,096 x 2 bytes, half of the smallest copied tensor
    memory = [
        evaluate(replace(_request().task(), full_pack=pack), ParallelConfig(), recompute).memory[0]
        for recompute in (RecomputeConfig(), RecomputeConfig(offload_layers=9))
    ]
    assert memory[0].total == memory[1].total


def test_grouped_queries_in_fp32_keep_their_logits_on_a_gpu() -> None:
    """Segments of 256 and 218 are one padded batch; without groups and in 16 bits a fused kernel keeps no logits."""
    lengths, heads = (256, 218, 504, 46), Heads(query=4, key=2, width=64, value=64)
    setting = Setting(model=named_config("tiny"), pack=Pack(segments=lengths, grids=()), kernels="cuda", wide=4)
    logits = 4 * 4 * (504**2 + 2 * 256**2 + 46**2)
    copies = 4 * 4 * (504 + 2 * 256 + 46) * 3 * 64  # of queries, and of keys and values for every query head
    core = attention_core(setting, lengths, heads)
    assert core.kept == logits + copies
    assert (
        core.peak > 2 * 4 * 4 * 504**2
    )  # gradients of the logits of the longest segment, before and after the softmax
    for other in (replace(setting, wide=2), replace(setting, kernels="cpu")):
        assert attention_core(other, lengths, heads).kept < logits
    assert attention_core(setting, lengths, replace(heads, key=4)).kept < logits


@pytest.mark.slow
def test_a_search_finds_layouts_that_the_trainer_takes_and_that_fit() -> None:
    request = _request()
    task = request.task()
    found = search(task, keep=5)
    assert len(found.candidates) == 5
    assert found.candidates == sorted(found.candidates, key=lambda candidate: candidate.time.total)
    for candidate in found.candidates:
        parallel = candidate.parallel
        assert candidate.memory[candidate.fullest].total <= task.limit
        assert parallel.model_parallel_size * candidate.dp_size == 64
        assert candidate.num_microbatches * candidate.dp_size == request.global_batch_size
        check_parallel(task.model, parallel)
        assert 0.1 < candidate.mfu < 0.58
        assert candidate.time.total == pytest.approx(sum(vars(candidate.time).values()))


@pytest.mark.parametrize(("tp_size", "ways"), [(1, [False]), (4, [False, True]), (8, [True])])
def test_a_vision_encoder_that_cannot_be_split_is_only_spread(tp_size: int, ways: list[bool]) -> None:
    task = _request("qwen2.5-vl-3b").task()  # 8 does not divide the vision_encoder's ffn_hidden_size of 3420
    assert [parallel.spread_images for parallel in spreads(task, ParallelConfig(tp_size=tp_size))] == ways


def test_what_does_not_fit_is_counted_and_the_nearest_is_named() -> None:
    found = search(_request("mindvl-671b-a37b", num_devices=8).task())
    assert not found.candidates
    assert found.num_full > 0
    assert found.misses[0].memory[found.misses[0].fullest].total > 60e9
    refused: Counter[str] = Counter()
    assert list(layouts(_request("mindvl-8b", num_devices=64).task(), refused))
    assert any("tensor parallel size exceeds" in reason for reason in refused)
    assert any("does not divide language.num_heads=32" in reason for reason in refused)
    with pytest.raises(ModelError):
        check_parallel(named_config("mindvl-8b"), ParallelConfig(tp_size=8, cp_size=8, spread_images=True))


@pytest.mark.slow
def test_longer_packs_leave_less_room_for_images() -> None:
    request = _request()
    best = search(request.task(), keep=1).candidates[0]
    found = room(request, best, (2048, 8192, 65536))
    assert found[0].visual_tokens == 2048
    assert found[1].visual_tokens is not None
    assert found[1].visual_tokens >= request.visual_limit - 8192 // 32
    assert found[2].visual_tokens is None
    assert largest_pixels(request, best) == found[1].visual_tokens * 784


@pytest.mark.slow
def test_days_are_steps_times_seconds() -> None:
    request = _request()
    best = search(request.task(), keep=1).candidates[0]
    warmup, multitask, _ = days(request, best, BUDGETS["mindvl-8b"])
    assert multitask.step_s == pytest.approx(best.time.total)
    assert multitask.days == pytest.approx(179e9 / (1024 * 8192) * best.time.total / 86400)
    assert warmup.step_s < multitask.step_s  # the projector alone needs fewer gradients


def test_recomputation_and_slow_links_cost_time() -> None:
    request = _request()
    task, parallel = request.task(), ParallelConfig(tp_size=4, spread_images=False)
    plain = evaluate(task, parallel, RecomputeConfig())
    again = evaluate(task, parallel, RecomputeConfig(kind="full"))
    slow = evaluate(replace(task, machine=replace(task.machine, link_gb_s=8.0)), parallel, RecomputeConfig())
    assert again.time.recompute > 0.2 * again.time.matmul
    assert again.memory[0].activations < plain.memory[0].activations
    assert slow.time.tp == pytest.approx(plain.time.tp * 32 / 8)


def test_offloaded_activations_are_on_the_host_and_cost_time_where_copies_are_slow() -> None:
    request = _request()
    task, parallel = request.task(), ParallelConfig(pp_size=2, stage_layers=(18, 18), spread_images=False)
    plain = evaluate(task, parallel, RecomputeConfig())
    half = evaluate(task, parallel, RecomputeConfig(offload_layers=9))
    whole = evaluate(task, parallel, RecomputeConfig(offload_layers=18))
    # 18 layers on each of two stages; the first stage holds two packs.
    assert [memory.host for memory in plain.memory] == [0.0, 0.0]
    assert whole.memory[0].host == pytest.approx(2 * half.memory[0].host) == pytest.approx(2 * whole.memory[1].host)
    left, before = (one.memory[0].activations_by["decoder"] for one in (whole, plain))
    assert left < 0.01 * before  # the boundary to the next stage
    for fewer, more in ((plain, half), (half, whole)):
        assert more.memory[0].total < fewer.memory[0].total
        assert more.time.total >= fewer.time.total
    fast = replace(task, machine=replace(task.machine, device=replace(task.machine.device, bf16_tflops=4000.0)))
    hidden, exposed = (evaluate(one, parallel, RecomputeConfig(offload_layers=18)).time for one in (task, fast))
    assert exposed.offload > hidden.offload
    assert plain.time.offload == 0.0


def test_activations_are_offloaded_where_recomputation_is_not_enough() -> None:
    """With many packs in flight the inputs of recomputed layers take more than the two layers that are copied."""
    request = replace(_request(num_devices=8), visual_share=0.0, global_batch_size=64)
    task, parallel = request.task(), ParallelConfig(pp_size=8, virtual_stages=4, spread_images=False)
    assigned = with_stage_layers(task, parallel)
    assert assigned is not None
    again = evaluate(task, assigned, RecomputeConfig(kind="full"))
    away = evaluate(task, assigned, RecomputeConfig(offload_layers=max(assigned.stage_layers or ())))
    need, less = (one.memory[one.fullest].total for one in (again, away))
    assert less < need
    between = replace(task, machine=replace(task.machine, memory_gb=(need + less) / 2e9 / 0.94))
    found = remedies(between, assigned)
    assert {(one.recompute.kind, one.recompute.offload_layers > 0, one.offload) for one in found} == {
        ("none", True, False),
        ("full", False, True),  # without recomputation even the moments on the host do not suffice
    }
    assert [one.recompute for one in search(between).candidates if one.parallel == assigned] == [found[0].recompute]
    ample = replace(task, machine=replace(task.machine, memory_gb=need / 1e9 / 0.94 + 1))
    assert {one.recompute.kind for one in remedies(ample, assigned)} >= {"full"}
    (searched,) = (one for one in search(ample, keep=100).candidates if one.parallel == assigned)
    assert searched.recompute.offload_layers == 0  # recomputation is enough


def test_more_host_memory_than_a_server_has_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    request = replace(_request(num_devices=128), seq_length=16384, trained=("projector",))
    task, parallel = request.task(), replace(LAYOUTS["mindvl-8b"], spread_images=False)
    offloaded = [one for one in remedies(task, parallel) if one.recompute.offload_layers]
    assert len(offloaded) == 1
    host = max(memory.host for memory in offloaded[0].memory)
    monkeypatch.setattr(sys.modules["mindvl_train.layout_search.search"], "HOST_GB", host / 1e9 - 1)
    assert not [one for one in remedies(task, parallel) if one.recompute.offload_layers]


def test_activations_by_kind_of_layer_add_up() -> None:
    task = _request("mindvl-671b-a37b", 1024).task()
    parallel = ParallelConfig(pp_size=4, ep_size=32, stage_layers=(13, 16, 16, 16), spread_images=False)
    plain = evaluate(task, parallel, RecomputeConfig())
    for memory in plain.memory:
        assert sum(memory.activations_by.values()) == pytest.approx(memory.activations)
    assert [{"vision", "head"} & memory.activations_by.keys() for memory in plain.memory] == [
        {"vision"},
        set(),
        set(),
        {"head"},
    ]
    assert plain.memory[1].activations_by["experts"] > plain.memory[1].activations_by["decoder"]
    assert plain.memory[3].activations_by["prediction"] > 0
    again = evaluate(task, parallel, RecomputeConfig(kind="full"))
    assert "experts" not in again.memory[1].activations_by


def test_a_text_only_model_task_has_no_images() -> None:
    request = replace(_request(), visual_share=0.0)
    model: MindVLConfig = request.model
    assert request.visual_limit == 0
    assert request.task().full_pack.grids == ()
    assert Setting(model=model, pack=request.task().full_pack).patches == 0


def test_sizes_that_do_not_divide_the_devices_are_no_refused_layouts() -> None:
    refused: Counter[str] = Counter()
    found = list(layouts(replace(_request(num_devices=12), global_batch_size=12).task(), refused))
    assert {parallel.tp_size * parallel.cp_size for parallel in found} == {1, 2, 4}
    assert not [reason for reason in refused if "global_batch_size" in reason or "server" in reason]
