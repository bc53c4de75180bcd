# SPDX-License-Identifier: Apache-2.0
"""Every moment of a step belongs to one phase."""

import itertools

import pytest
import torch

from mindvl_model import MindVLModel, enter
from mindvl_model.testing.rows import pack, random_segment
from mindvl_model.testing.tiny import randomize, smallest_config
from mindvl_train import step_clock
from mindvl_train.parallel import process_groups
from mindvl_train.step_clock import StepClock, current_phase, phase, seconds_by_phase, separate_vision

CPU = torch.device("cpu")


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves on by one second whenever it is looked at."""
    seconds = itertools.count()
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: float(next(seconds)))


@pytest.mark.usefixtures("ticking")
def test_the_innermost_phase_gets_the_time_and_all_of_them_add_up() -> None:
    clock = StepClock(CPU)
    with clock.measure(True):  # looked at 0
        with phase("data"):  # 1
            assert current_phase() == "data"
        with phase("language"), phase("communication"):  # from 3 and from 4
            assert current_phase() == "communication"
        # left at 5 and 6, the end is 7
    seconds = clock.take()
    assert seconds is not None
    assert (seconds["host"], seconds["data"], seconds["language"], seconds["communication"]) == (3, 1, 2, 1)
    assert sum(seconds.values()) == 7
    assert clock.take() is None


@pytest.mark.usefixtures("ticking")
def test_a_step_that_is_not_measured_costs_no_look_at_the_clock() -> None:
    clock = StepClock(CPU)
    with clock.measure(False), phase("data"):
        assert current_phase() == "data"
    assert clock.take() is None
    assert step_clock.time.perf_counter() == 0.0


def test_an_error_leaves_the_process_in_the_phase_it_was_in() -> None:
    with pytest.raises(KeyError), phase("optimizer"):
        raise KeyError("lost")
    assert current_phase() == "host"


def test_times_of_any_kind_are_summed_by_phase() -> None:
    marks = [("a", "host"), ("b", "data"), ("b", "host"), ("d", "data"), ("f", "host")]
    seconds = seconds_by_phase(marks, lambda start, end: float(ord(end) - ord(start)))  # type: ignore[arg-type]
    assert (seconds["host"], seconds["data"]) == (1 + 2, 0 + 2)


def test_tower_and_projector_are_told_from_the_language_model_in_forward_and_backward() -> None:
    config = smallest_config(vocab_size=264)
    row = pack([random_segment(config, grids=[(1, 4, 4)], num_text=9, seed=1)])
    from mindvl_model.megatron.blocks import Layout

    with process_groups(enter(), seed=0):
        model = MindVLModel(config, Layout())
        randomize(model)
        separate_vision(model)
        seen: list[str] = []
        for name, parameter in model.named_parameters():
            if name in ("vision.patch_embed.weight", "language.decoder.layers.0.self_attention.linear_qkv.weight"):
                parameter.register_post_accumulate_grad_hook(lambda _: seen.append(current_phase()))
        for part in (model.vision, model.language.decoder):
            assert part is not None
            part.register_forward_hook(lambda *_: seen.append(current_phase()))
        clock = StepClock(CPU)
        with clock.measure(True), phase("language"):
            model(**row).backward()
        seconds = clock.take()
    assert seen == ["vision", "language", "language", "vision"]  # forward, then backward the other way round
    assert seconds is not None
    assert seconds["vision"] > 0
    assert seconds["language"] > 0
    assert current_phase() == "host"
