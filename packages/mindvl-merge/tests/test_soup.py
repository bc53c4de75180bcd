# SPDX-License-Identifier: Apache-2.0
"""A greedy soup keeps what raises the score, and asks for no score twice."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindvl_merge import MergeConfig, MergeError, greedy_soup


@pytest.fixture
def models(make_directory):
    """Scalars 1, 4, 10 and 3; the score is the negative distance of the mean from 3.4."""
    return tuple(
        make_directory(name, {"w": torch.tensor([v])}) for name, v in zip("abcd", (1.0, 4.0, 10.0, 3.0), strict=True)
    )


def _value(path):
    return load_file(path / "model.safetensors")["w"].item()


class Scores:
    def __init__(self, fail_at=None):
        self.seen, self.fail_at = [], fail_at

    def __call__(self, path):
        if len(self.seen) == self.fail_at:
            raise KeyboardInterrupt
        self.seen.append(_value(path))
        return -abs(self.seen[-1] - 3.4)


def test_models_join_in_the_order_of_their_scores_while_the_average_improves(tmp_path, models):
    score = Scores()
    document = greedy_soup(MergeConfig(models=models, out=tmp_path / "out"), score)
    # alone: d 0.4, b 0.6, a 2.4, c 6.6 away. d and b: 3.5, better; with a: 2.67, worse; with c: 5.67, worse.
    assert _value(tmp_path / "out") == 3.5
    assert [(one["model"][-1], one["kept"]) for one in document["soup"]] == [
        ("d", True),
        ("b", True),
        ("a", False),
        ("c", False),
    ]
    assert document == json.loads((tmp_path / "out" / "merge.json").read_text())
    assert len(score.seen) == 4 + 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "d", "out"]


def test_an_interrupted_soup_asks_only_for_missing_scores(tmp_path, models):
    config, first = MergeConfig(models=models, out=tmp_path / "out"), Scores(fail_at=5)
    with pytest.raises(KeyboardInterrupt):
        greedy_soup(config, first)
    second = Scores()
    greedy_soup(config, second)
    assert len(first.seen) + len(second.seen) == 7
    assert _value(tmp_path / "out") == 3.5


def test_scores_of_another_benchmark_are_not_used(tmp_path, models):
    config = MergeConfig(models=models, out=tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        greedy_soup(config, Scores(fail_at=5), scored_by="one")
    second = Scores()
    greedy_soup(config, second, scored_by="two")
    assert len(second.seen) == 7


def test_other_methods_and_weights_are_refused(tmp_path, models):
    for values in ({"weights": (0.25,) * 4}, {"method": "task_arithmetic", "base": models[0]}):
        with pytest.raises(MergeError, match="a greedy soup is an average with equal weights"):
            greedy_soup(MergeConfig(models=models, out=tmp_path / "out", **values), Scores())


def test_a_model_stays_if_the_average_with_it_scores_as_well(tmp_path, models):
    document = greedy_soup(MergeConfig(models=models, out=tmp_path / "out"), lambda path: 1.0)
    assert [one["kept"] for one in document["soup"]] == [True] * 4


def test_an_average_must_reach_the_score_of_the_average_before(tmp_path, make_directory):
    models = tuple(make_directory(name, {"w": torch.tensor([v])}) for name, v in (("a", 3.0), ("b", 3.8), ("c", 2.5)))
    # alone: a 0.4, b 0.4, c 0.9 away. a and b: 3.4, exact; with c: 3.1, worse than that and better than any model alone.
    document = greedy_soup(MergeConfig(models=models, out=tmp_path / "out"), Scores())
    assert [one["kept"] for one in document["soup"]] == [True, True, False]


@pytest.mark.parametrize("change", ["weights", "match_tokens"])
def test_scores_of_other_weights_and_of_another_average_are_not_used(tmp_path, models, change):
    config = MergeConfig(models=models, out=tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        greedy_soup(config, Scores(fail_at=5))
    if change == "match_tokens":
        config = replace(config, match_tokens=True)
    else:  # a file of the same size
        save_file({"w": torch.tensor([3.2])}, models[3] / "model.safetensors", metadata={"format": "pt"})
    second = Scores()
    greedy_soup(config, second)
    assert len(second.seen) >= (7 if change == "match_tokens" else 4)
