# SPDX-License-Identifier: Apache-2.0
"""Routing metrics, compared with values by hand, with exhaustive search, and on models with experts."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from mindvl_model import ModelError
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.routing import RoutingAnalysis, RoutingScore, analysis_of, run_packs
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen3_moe

TEXT = np.zeros(64, dtype=bool)


def random_choices(seed: int, *, tokens: int, layers: int, experts: int, each: int) -> dict[int, np.ndarray]:
    """Random distinct experts [T, K] of each layer."""
    generator = np.random.default_rng(seed)
    shape = (tokens, experts)
    return {layer: generator.random(shape).argsort(axis=1)[:, :each] for layer in range(layers)}


def wants(choices: dict[int, np.ndarray], length: int, experts: int) -> np.ndarray:
    """Number of selections of each expert per window, counted one by one: [windows, layers * experts]."""
    tokens = len(choices[0])
    packs = []
    for start in range(tokens - length + 1):
        pack = [0] * (len(choices) * experts)
        for place, layer in enumerate(sorted(choices)):
            for expert in choices[layer][start : start + length].ravel():
                pack[place * experts + expert] += 1
        packs.append(pack)
    return np.array(packs)


def best_f1_of_all_choices(counts: np.ndarray, length: int) -> float:
    """Largest F1 score over all subsets of (window, expert) pairs."""
    flat = counts.ravel()
    subsets = (np.arange(1, 2 ** len(flat))[:, None] >> np.arange(len(flat))) & 1
    hits, predictions = subsets @ flat, subsets.sum(axis=1) * length
    return float((2 * hits / (predictions + flat.sum())).max())


def best_hit_rate_of_all_caches(counts: np.ndarray, size: int) -> float:
    """Best hit rate over all caches of this size, for each window."""
    served = sum(max(sum(pack[list(kept)]) for kept in combinations(range(len(pack)), size)) for pack in counts)
    return float(served / counts.sum())


def only(scores: tuple[RoutingScore, ...], **wanted: Any) -> RoutingScore:
    """The only score with these field values."""
    (found,) = [score for score in scores if all(getattr(score, name) == value for name, value in wanted.items())]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_both_measures_are_the_best_of_all_possible_choices(seed: int) -> None:
    choices = random_choices(seed, tokens=4, layers=2, experts=3, each=2)
    analysis = RoutingAnalysis(num_experts=3, experts_per_token=2, layers=(0, 1), segment_lengths=(2, 3))
    analysis.add_pack(choices, [("a", 4)], TEXT[:4])
    sizes = (0.5, 1.0, 1.5)  # 1, 2, 3 experts of a layer; 2, 4, 6 of the model
    for length in (2, 3):
        score = only(analysis.scores(sizes), segment_length=length, source="all", modality="all")
        assert score.windows == 5 - length
        if length == 3:  # 2 windows of 6 experts: 4,096 choices
            assert score.srp == pytest.approx(best_f1_of_all_choices(wants(choices, 3, 3), 3))
        for size, hit in zip((2, 4, 6), score.hit_rates, strict=True):
            assert hit == pytest.approx(best_hit_rate_of_all_caches(wants(choices, length, 3), size))
        for layer in score.layers:
            counts = wants({0: choices[layer.layer]}, length, 3)  # at most 3 windows of 3 experts: 512 choices
            assert layer.srp == pytest.approx(best_f1_of_all_choices(counts, length))
            assert layer.hit_rates == pytest.approx([best_hit_rate_of_all_caches(counts, size) for size in (1, 2, 3)])


def test_tokens_that_all_want_the_same_experts_are_served_by_just_these() -> None:
    analysis = RoutingAnalysis(num_experts=8, experts_per_token=2, layers=(3,), segment_lengths=(4,))
    analysis.add_pack({3: np.tile([6, 1], (10, 1))}, [("a", 10)], TEXT[:10])
    score = only(analysis.scores((0.5, 1.0)), source="a", modality="text")
    assert (score.srp, score.group_size, score.hit_rates, score.windows) == (1.0, 1.0, (0.5, 1.0), 7)
    assert score.curve[0] == (0.0, 0.0)
    assert score.curve[-1] == (4.0, 1.0)


def test_tokens_that_alternate_need_both_experts_by_hand() -> None:
    """Three windows of two tokens select each expert once: six hits in twelve predictions, F1 = 12 / 18."""
    analysis = RoutingAnalysis(num_experts=2, experts_per_token=1, layers=(0,), segment_lengths=(2,))
    analysis.add_pack({0: np.array([[0], [1], [0], [1]])}, [("a", 4)], TEXT[:4])
    score = only(analysis.scores((1.0, 2.0)), source="all", modality="all")
    assert (score.srp, score.group_size, score.hit_rates) == (pytest.approx(2 / 3), 2.0, (0.5, 1.0))


def test_windows_stay_inside_samples_and_are_grouped_by_source_and_modality() -> None:
    choices = random_choices(1, tokens=20, layers=2, experts=6, each=2)
    visual = np.zeros(20, dtype=bool)
    visual[2:7] = True
    analysis = RoutingAnalysis(num_experts=6, experts_per_token=2, layers=(0, 1), segment_lengths=(3,))
    analysis.add_pack(choices, [("photos", 9), ("tiny", 2), ("texts", 5)], visual)  # four tokens of padding
    scores = analysis.scores()
    windows = {(score.source, score.modality): score.windows for score in scores}
    assert windows == {
        ("all", "all"): 10,
        ("all", "visual"): 3,  # 2-4, 3-5, 4-6
        ("all", "text"): 3,
        ("all", "mixed"): 4,
        ("photos", "all"): 7,
        ("photos", "visual"): 3,
        ("photos", "mixed"): 4,
        ("texts", "all"): 3,
        ("texts", "text"): 3,
    }
    assert analysis.tokens_in_short_samples == {3: 2}
    assert analysis.num_tokens == 16
    alone = RoutingAnalysis(num_experts=6, experts_per_token=2, layers=(0, 1), segment_lengths=(3,))
    alone.add_pack({layer: experts[2:7] for layer, experts in choices.items()}, [("photos", 5)], visual[2:7])
    assert (
        only(alone.scores(), source="photos", modality="all").srp
        == only(scores, source="photos", modality="visual").srp
    )


def test_packs_are_folded_in_pieces_and_memory_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    packs = [random_choices(seed, tokens=40, layers=2, experts=6, each=2) for seed in range(6)]

    def analysed() -> RoutingAnalysis:
        analysis = RoutingAnalysis(num_experts=6, experts_per_token=2, layers=(0, 1), segment_lengths=(4, 8))
        for pack in packs:
            analysis.add_pack(pack, [("a", 25), ("b", 15)], TEXT[:40])
        return analysis

    whole = analysed()
    monkeypatch.setattr("mindvl_model.routing._CHUNK", 50)  # four windows at a time
    assert analysed().scores() == whole.scores()
    all_wants = [wants({k: v[a:b] for k, v in pack.items()}, 4, 6) for pack in packs for a, b in ((0, 25), (25, 40))]
    served = np.sort(np.concatenate(all_wants), axis=1)[:, -4:].sum() / np.concatenate(all_wants).sum()
    assert only(whole.scores((1.0,)), source="all", modality="all", segment_length=4).hit_rates == (served,)
    held = sum(tally.histogram.nbytes + tally.by_rank.nbytes for tally in whole._tallies.values())
    whole.add_pack(packs[0], [("a", 40)], TEXT[:40])
    assert sum(tally.histogram.nbytes + tally.by_rank.nbytes for tally in whole._tallies.values()) == held


@dataclass
class Part:
    source: str
    length: int


@dataclass
class Pack:
    inputs: dict[str, Any]
    samples: list[Part]

    def model_inputs(self) -> dict[str, Any]:
        return self.inputs


@pytest.mark.parametrize("build", [smallest_qwen3_moe, smallest_deepseek_v3])
def test_a_model_with_experts_is_analysed_over_packed_packs(
    build: Callable[..., Any], make_model: Callable[..., Any]
) -> None:
    config = build()
    packs = []
    for seed in range(3):
        parts = [random_segment(config, [(1, 8, 8)], seed=seed), random_segment(config, num_text=12, seed=seed + 10)]
        own = [Part("photos", len(parts[0].input_ids)), Part("texts", len(parts[1].input_ids))]
        packs.append(Pack(pack_segments(parts, padding=4), own))
    analysis = analysis_of(config, (4, 8))
    assert list(run_packs(make_model(config), packs, analysis, config.tokens)) == [1, 2, 3]
    assert analysis.layers == ((0, 1) if config.language.family == "qwen3_moe" else (1, 2))
    scores = analysis.scores((1.0, 4.0))
    assert {score.modality for score in scores if score.source == "photos"} == {"all", "visual", "text", "mixed"}
    assert {score.modality for score in scores if score.source == "texts"} == {"all", "text"}
    for score in scores:
        assert 0 < score.hit_rates[0] <= score.hit_rates[1] == 1.0  # four times two are all eight experts
        assert 0 < score.srp <= 1
        assert [layer.layer for layer in score.layers] == list(analysis.layers)
    assert analysis.num_tokens == sum(part.length for pack in packs for part in pack.samples)


def test_invalid_routing_is_refused() -> None:
    with pytest.raises(ModelError, match="model with a qwen3 decoder has no experts"):
        analysis_of(smallest_config())
    with pytest.raises(ModelError, match=r"segment_lengths: .* got \(0,\)"):
        analysis_of(smallest_qwen3_moe(), (0,))
    analysis = analysis_of(smallest_qwen3_moe(), (2,))
    with pytest.raises(ModelError, match=r"layer 1: must have shape \[4, 2\] .*got None"):
        analysis.add_pack({0: np.zeros((4, 2), dtype=int)}, [("a", 4)], TEXT[:4])
    with pytest.raises(ModelError, match="expert 8 does not exist in a model with 8 experts"):
        analysis.add_pack(dict.fromkeys((0, 1), np.full((4, 2), 8)), [("a", 4)], TEXT[:4])
    with pytest.raises(ModelError, match="cache_sizes"):
        analysis.scores((0.0,))
