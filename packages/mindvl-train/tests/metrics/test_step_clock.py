# SPDX-License-Identifier: Apache-2.0
"""Every moment of a measured step belongs to one phase."""

import itertools

import pytest
import torch
import torch.distributed as dist

from mindvl_model import MindVLModel, set_up_device
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import randomize, smallest_config
from mindvl_train.metrics import step_clock
from mindvl_train.metrics.step_clock import StepClock, seconds_by_phase
from mindvl_train.parallel_state import process_groups

CPU = torch.device("cpu")


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves on by one second whenever it is looked at."""
    seconds = itertools.count()
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: float(next(seconds)))


@pytest.mark.usefixtures("ticking")
def test_the_innermost_phase_gets_the_time_and_all_of_them_add_up() -> None:
    with process_groups(set_up_device(), seed=0):
        clock = StepClock(CPU)
        clock.start()  # looked at 0
        clock.begin("data")  # 1
        clock.begin("compute")  # 2
        dist.all_reduce(torch.ones(2))  # called from 3 to 4, waited for from 5 to 6
        clock.begin("update")  # 7
        clock.begin("report")  # 8
        clock.stop()  # 9
    seconds = clock.take()
    assert seconds is not None
    assert {name: value for name, value in seconds.items() if value} == {
        "host": 2,
        "data": 1,
        "language": 3,
        "communication": 2,
        "optimizer": 1,
    }
    assert clock.take() is None


@pytest.mark.usefixtures("ticking")
def test_a_step_that_is_not_measured_costs_no_look_at_the_clock() -> None:
    clock = StepClock(CPU)
    clock.begin("data")
    clock.stop()
    assert clock.take() is None
    assert step_clock.time.perf_counter() == 0.0


def test_times_of_any_kind_are_summed_by_phase() -> None:
    marks = [("a", "host"), ("b", "data"), ("b", "host"), ("d", "data"), ("f", "host")]
    seconds = seconds_by_phase(marks, lambda start, end: float(ord(end) - ord(start)))  # type: ignore[arg-type]
    assert (seconds["host"], seconds["data"]) == (1 + 2, 0 + 2)


def test_vision_encoder_and_projector_are_separated_from_the_language_model_in_forward_and_backward() -> None:
    config = smallest_config(vocab_size=264)
    pack = pack_segments([random_segment(config, grids=[(1, 4, 4)], num_text=9, seed=1)])
    from mindvl_model.megatron.blocks import BuildConfig

    with process_groups(set_up_device(), seed=0):
        model = MindVLModel(config, BuildConfig())
        randomize(model)
        clock = StepClock(CPU, [model])
        seen: list[str] = []
        for name, parameter in model.named_parameters():
            if name in ("vision.patch_embed.weight", "language.decoder.layers.0.self_attention.linear_qkv.weight"):
                parameter.register_post_accumulate_grad_hook(lambda _: seen.append(clock._stack[-1]))
        for part in (model.vision, model.language.decoder):
            assert part is not None
            part.register_forward_hook(lambda *_: seen.append(clock._stack[-1]))
        model(**pack).backward()
        assert seen == ["host"] * 4  # nothing is measured yet
        seen.clear()
        clock.start()
        clock.begin("compute")
        model(**pack).backward()
        model(**pack)
        clock.stop()
    seconds = clock.take()
    assert seen == ["vision", "language", "language", "vision", "vision", "language"]  # backward the other way round
    assert seconds is not None
    assert min(seconds["vision"], seconds["language"]) > 0
