# SPDX-License-Identifier: Apache-2.0
"""Waiting is put down to what caused it, and the parts add up to the step."""

import pytest

from mindvl_train.metrics.step_clock import PHASES, Phase
from mindvl_train.metrics.step_split import RankTime, StepSplit, split_step


def rank(dp_rank: int = 0, pp_rank: int = 0, **seconds: float) -> RankTime:
    of_phase: dict[Phase, float] = {name: seconds.get(name, 0.0) for name in PHASES}
    return RankTime(dp_rank, pp_rank, of_phase)


def test_a_single_rank_does_not_wait() -> None:
    split = split_step([rank(data=1, vision=2, language=5, optimizer=1, host=0.5, communication=0.25)])
    assert split == StepSplit(
        vision=2,
        language=5,
        data_wait=1,
        vision_imbalance=0,
        language_imbalance=0,
        pipeline_bubble=0,
        exposed_communication=0.25,
        optimizer=1,
        host=0.5,
    )
    assert split.total == 9.75


def test_waiting_for_a_rank_with_more_images_is_vision_imbalance() -> None:
    split = split_step([rank(0, vision=1, language=4, communication=3.5), rank(1, vision=4, language=4)])
    # the slowest works 8, the mean is 6.5; what is left of the waiting, 1.75 on average, is no imbalance
    assert (split.vision, split.language) == (2.5, 4)
    assert split.vision_imbalance == pytest.approx(1.5)
    assert split.exposed_communication == pytest.approx(0.25)
    assert split.total == pytest.approx(8.25)  # the mean of 8.5 and 8


def test_one_slow_loader_is_data_wait_of_all() -> None:
    split = split_step([rank(0, data=0, language=4, communication=6), rank(1, data=6, language=4)])
    assert split.data_wait == pytest.approx(6)
    assert split.language_imbalance == split.exposed_communication == 0
    assert split.total == 10


def test_more_of_both_is_shared_as_it_arose_and_less_of_one_pays_for_the_other() -> None:
    both = split_step([rank(0, vision=1, language=1, communication=4), rank(1, vision=2, language=4)])
    assert (both.vision_imbalance, both.language_imbalance) == pytest.approx((0.5, 1.5))
    paid = split_step([rank(0, vision=3, language=1, communication=1), rank(1, vision=1, language=4)])
    assert (paid.vision_imbalance, paid.language_imbalance) == (0, pytest.approx(0.5))


def test_a_slow_stage_is_imbalance_and_the_rest_of_waiting_for_stages_the_bubble() -> None:
    # one pipeline of two stages: the vision encoder makes the first one slower by 2, fill and drain cost 3 each
    split = split_step([rank(0, 0, vision=2, language=6, pipeline=3), rank(0, 1, language=6, pipeline=5)])
    assert split.vision_imbalance == pytest.approx(1)
    assert split.pipeline_bubble == pytest.approx(3)
    assert split.exposed_communication == 0
    assert split.total == 11


def test_two_pipelines_of_two_stages_wait_inside_and_for_each_other() -> None:
    times = [
        rank(0, 0, language=4, pipeline=1, communication=3),
        rank(0, 1, language=4, pipeline=1, communication=3),
        rank(1, 0, language=6, pipeline=2),
        rank(1, 1, language=6, pipeline=2),
    ]
    split = split_step(times)
    assert split.language_imbalance == pytest.approx(1)  # 6 against 5 on average
    assert split.pipeline_bubble == pytest.approx(1.5)
    assert split.exposed_communication == pytest.approx(0.5)
    assert split.total == 8


def test_tensor_parallel_ranks_count_as_one_position_and_no_part_is_negative() -> None:
    peers = [rank(0, language=4.1, communication=0.1), rank(0, language=3.9, communication=0.3)]
    split = split_step(peers)
    assert (split.language_imbalance, split.exposed_communication) == (0, pytest.approx(0.2))
    # a slower rank without waiting time of the others, because clocks are not exact
    odd = split_step([rank(0, language=4, communication=0.1), rank(1, language=5)])
    assert odd.language_imbalance == pytest.approx(0.05)
    assert min(vars(odd).values()) >= 0
    assert odd.total == pytest.approx(4.55)
