# SPDX-License-Identifier: Apache-2.0
"""Parts of a rehearsal, each on its own: fake tensors, memory, costs of operators, answers, packs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from mindvl_model import named_config
from mindvl_train.errors import TrainError
from mindvl_train.layout_search.packs import Pack
from mindvl_train.rehearsal.answers import numbers_of, objects_of_all
from mindvl_train.rehearsal.fake_device import FakeDevice
from mindvl_train.rehearsal.job import TOKENS
from mindvl_train.rehearsal.memory import MemoryLog
from mindvl_train.rehearsal.messages import MessageLog, Moment
from mindvl_train.rehearsal.operators import cost_of
from mindvl_train.rehearsal.packs import Packs
from mindvl_train.rehearsal.sources import calling_line, running


@pytest.fixture
def device():
    """A fake CPU; tensors that are made on a device are fake, those from Python values are on the host."""
    at = Moment()
    mode = FakeDevice(torch.device("cpu"), at, MemoryLog(is_device=False), MessageLog(at))
    mode.is_building = False
    return mode


def fake(*shape: int, **options) -> torch.Tensor:
    return torch.empty(*shape, device="cpu", **options)


def test_device_operators_have_shapes_and_host_operators_have_values(device):
    with device:
        product = fake(3, 4) @ fake(4, 5)
        host = torch.tensor([0, 1, 2]) + 1
    assert isinstance(product, FakeTensor)
    assert product.shape == (3, 5)
    assert host.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "operate",
    [
        lambda x: x.t(),
        lambda x: x[1:, 2],
        lambda x: x.view(6, 4).split([2, 4])[1],
        lambda x: x.transpose(0, 1).contiguous(),
        lambda x: x.mul_(2),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.view(torch.int32),
        lambda x: torch.topk(x, 2, dim=1)[1],
        lambda x: x.expand(3, 4, 6),
    ],
)
def test_a_repeated_operator_has_the_result_of_the_first_and_of_real_tensors(operate, device):
    expected = operate(torch.zeros(4, 6))
    with device:
        results = [operate(base.narrow(0, 1, 4)) for base in (fake(9, 6), fake(9, 6))]
    for result in results:
        seen = (tuple(result.shape), result.stride(), result.dtype)
        assert seen == (tuple(expected.shape), expected.stride(), expected.dtype)
    assert results[0].storage_offset() == results[1].storage_offset()


def test_views_share_storage_and_in_place_operators_return_their_argument(device):
    with device:
        for _ in range(2):  # the second time from the cache
            base = fake(4, 6)
            assert base[1:].untyped_storage()._cdata == base.untyped_storage()._cdata
            assert base.add_(1) is base
    assert device.memory.peak_bytes == 2 * 4 * 6 * 4


def test_backward_passes_run_on_fake_tensors(device):
    with device, torch.autograd.set_multithreading_enabled(False):
        weight = fake(8, 4).requires_grad_()
        (fake(16, 8) @ weight).relu().sum().backward()
    assert weight.grad is not None
    assert (weight.grad.shape, weight.grad.device.type) == (weight.shape, "cpu")


def test_an_operator_without_a_shape_rule_is_named(device):
    torch.library.define("mindvl_test::double", "(Tensor x) -> Tensor")
    torch.library.impl("mindvl_test::double", "cpu", lambda x: 2 * x)
    message = r"mindvl_test\.double\.default: has no shape rule.* Register one with torch\.library\.register_fake"
    with device, pytest.raises(TrainError, match=message):
        torch.ops.mindvl_test.double(fake(3))


def test_the_stream_that_uses_a_tensor_is_accepted_without_a_result(device):
    with device:
        assert fake(3).record_stream(torch.Stream(device="cpu")) is None


def test_memory_is_held_until_the_last_view_is_gone():
    log = MemoryLog(is_device=True)
    base = torch.empty(100)  # 400 bytes, rounded up to 512
    half = base[:50]
    assert log.add(base, "parameters", operator=1, phase=0, name="empty")
    assert not log.add(half, "temporary", operator=2, phase=0, name="slice")
    assert (log.now, log.categories()) == (512, {"parameters": 512})
    del base
    assert log.now == 512
    del half
    assert (log.now, log.peak_bytes, log.categories()) == (0, 512, {})


def test_the_peak_names_its_categories_also_after_they_were_assigned():
    log = MemoryLog(is_device=False)
    first, second = torch.empty(10), torch.empty(20)
    log.add(first, "other", operator=1, phase=0, name="empty")
    log.assign([first, None, torch.empty(1)], "gradients")
    log.add(second, "temporary", operator=2, phase=1, name="zeros")
    log.set_source("x.py:1")
    del second
    peak = log.peak()
    assert peak.categories == {"gradients": 40, "temporary": 80}
    assert (peak.num_bytes, peak.operator, peak.operator_name, peak.phase, peak.source) == (
        120,
        2,
        "zeros",
        1,
        "x.py:1",
    )
    log.restart()
    log.add(torch.empty(1), "other", operator=3, phase=1, name="empty")
    assert log.peak().num_bytes == 44


def test_a_thinned_timeline_keeps_the_highest_points():
    log = MemoryLog(is_device=False)
    held = [torch.empty(1)]
    log.add(held[0], "other", operator=0, phase=0, name="empty")
    for operator in range(1, 40000):
        tensor = torch.empty(1000 if operator == 777 else 1)
        log.add(tensor, "other", operator=operator, phase=0, name="empty")
    names, points = log.timeline()
    assert len(points) < 10000
    highest = max(points, key=lambda point: point.num_bytes)
    assert (highest.operator, highest.num_bytes) == (777, 4 + 4000)
    assert names == ("other",)
    assert highest.held == (4004,)


def test_the_cost_of_a_product_is_two_operations_for_each_pair():
    left, right = torch.empty(3, 4), torch.empty(4, 5)
    cost = cost_of(torch.ops.aten.mm.default, (left, right), {}, left @ right)
    assert (cost.flops, cost.bytes_read, cost.bytes_written) == (2 * 3 * 4 * 5, 4 * (12 + 20), 4 * 15)


def test_a_product_that_torch_npu_does_not_decompose_costs_the_same():
    left, right = torch.empty(2, 3, 4), torch.empty(4, 5)
    flops = 2 * 2 * 3 * 4 * 5
    assert cost_of(torch.ops.aten.matmul.default, (left, right), {}, left @ right).flops == flops
    arguments = (torch.empty(2, 3, 5), left, right, [True, True])
    assert cost_of(torch.ops.aten.matmul_backward.default, arguments, {}, (left, right)).flops == 2 * flops


def test_making_a_tensor_without_values_moves_no_bytes():
    made = torch.empty(8)
    assert cost_of(torch.ops.aten.empty.memory_format, ([8],), {}, made).bytes_written == 0
    assert cost_of(torch.ops.aten._unsafe_view.default, (made, [2, 4]), {}, made.view(2, 4)).bytes_read == 0


def test_one_handle_of_a_batch_awaits_all_its_members():
    """As torch_npu returns it; another handle awaits nothing."""
    log = MessageLog(Moment())
    handle, other = object(), object()
    fields = {"kind": "send", "group": "pp", "dtype": "float32", "shapes": (), "num_elements": 0, "num_bytes": 0}

    def original(operations):
        for _ in operations:
            log._append(**fields, is_async=True, source="", caller="")
        return [handle]

    log.batch(original)([1, 2])
    wait = log.wait(lambda handle: None)
    wait(other)
    assert [message.waited_at for message in log.messages] == [None, None]
    wait(handle)
    assert [message.waited_at for message in log.messages] == [2, 2]


def test_views_cost_nothing_and_expanded_axes_are_read_once():
    x = torch.empty(3, 1)
    assert cost_of(torch.ops.aten.t.default, (x,), {}, x.t()).bytes_read == 0
    wide = x.expand(3, 100)
    cost = cost_of(torch.ops.aten.neg.default, (wide,), {}, -wide)
    assert (cost.bytes_read, cost.bytes_written) == (4 * 3, 4 * 300)


def test_a_tensor_that_is_overwritten_is_not_read():
    x, y = torch.empty(8), torch.empty(8)
    assert cost_of(torch.ops.aten.copy_.default, (x, y), {}, x).bytes_read == 32
    assert cost_of(torch.ops.aten.add_.Tensor, (x, y), {}, x).bytes_read == 64


def host_sizes(value, num_rows):
    """Reads a number of rows per expert, as the operator of this name does."""
    return numbers_of(value)


def test_rows_are_spread_evenly_over_experts():
    assert host_sizes(torch.empty(4, dtype=torch.int64), 10) == [3, 3, 2, 2]


def _routed(value, *, rows, self, group):
    """Reads the rows that expert-parallel ranks exchange, as the expert layer does."""
    return numbers_of(value)


def test_rows_that_a_rank_sends_are_those_that_the_other_receives():
    """13 rows to 4 experts are 4, 3, 3, 3, so 7 for the experts of rank 0 and 6 for those of rank 1."""
    layer = SimpleNamespace(num_experts=4, ep_size=2)
    found = [
        _routed(torch.empty(2, 2), rows=range(13), self=layer, group=SimpleNamespace(rank=lambda rank=rank: rank))
        for rank in (0, 1)
    ]
    assert found == [[[7, 6], [7, 7]], [[7, 6], [6, 6]]]


def reduce_totals(value):
    """Reads the totals of a step."""
    return numbers_of(value)


def test_no_rank_asks_to_stop():
    assert reduce_totals(torch.empty(5)) == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert numbers_of(torch.empty(2, 2, dtype=torch.bool)) == [[True, True], [True, True]]


def test_other_ranks_give_the_object_of_this_rank():
    assert objects_of_all("a", 3) == ["a", "a", "a"]


def test_the_nearest_running_function_is_found():
    def ask():
        return running("outer", "inner")

    def inner(known):
        return ask()

    def outer():
        return inner(known=5)

    name, found = outer()
    assert (name, found["known"]) == ("inner", 5)
    assert running("nothing") == ("", {})


def test_lines_outside_of_the_project_have_no_source():
    assert calling_line() == ("?", "?")


def test_a_pack_has_the_inputs_of_the_loader():
    pack = Pack(segments=(20, 12), grids=((1, 4, 8),))
    model = named_config("tiny")
    source = Packs(
        pack,
        replace(model, tokens=TOKENS),
        "web",
        with_pixels=True,
        copied=True,
    )
    batch = next(source)
    inputs = batch.model_inputs()
    assert inputs["cu_seqlens"].tolist() == [0, 20, 32]
    assert int((inputs["input_ids"] == TOKENS.image).sum()) == 8
    assert [(sample.source, sample.length) for sample in batch.samples] == [("web", 20), ("web", 12)]
    copy = batch.to("cpu").model_inputs()
    assert copy["pixel_values"].data_ptr() != inputs["pixel_values"].data_ptr()
    assert copy["cu_seqlens"] is inputs["cu_seqlens"]


def test_stages_without_a_vision_encoder_have_no_pixels():
    model = named_config("tiny")
    source = Packs(Pack(segments=(20,), grids=((1, 4, 8),)), model, "web", with_pixels=False, copied=False)
    assert next(source).pixel_values.shape[0] == 0
