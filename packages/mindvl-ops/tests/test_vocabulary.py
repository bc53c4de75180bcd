# SPDX-License-Identifier: Apache-2.0
"""Losses over a cut vocabulary: equal to the whole one, in one process by hand and in two processes over gloo."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mindvl_ops import VocabularyShard, cross_entropy, linear_cross_entropy, use_backend
from mindvl_ops.vocabulary import local_target

pytestmark = pytest.mark.slow

VOCABULARY, TOKENS, WIDTH = 10, 7, 4
BACKENDS = ("reference", "torch")


def test_a_label_is_found_only_where_it_lives():
    column, here = local_target(torch.tensor([4, 5, 9, 10, -100]), start=5, size=5)
    assert (column.tolist(), here.tolist()) == ([0, 0, 4, 0, 0], [False, True, True, False, False])


def _inputs():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).double()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).double() * 3
    labels = torch.tensor([0, 4, 5, 9, -100, 2, 7])
    grad = torch.randn(TOKENS, generator=generator).double()
    return hidden, weight, labels, grad


def _results(loss_of, hidden, weight, grad):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = loss_of(hidden, weight)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight), grad)]


def _rank(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory / 'meet'}", rank=rank, world_size=2)
    hidden, weight, labels, grad = _inputs()
    shard = VocabularyShard.of_group(VOCABULARY // 2)
    mine = weight[shard.start : shard.start + VOCABULARY // 2]
    found = {}
    for backend in BACKENDS:
        with use_backend(backend):
            fused = _results(lambda h, w: linear_cross_entropy(h, w, labels, shard=shard), hidden, mine, grad)
            plain = _results(lambda h, w: cross_entropy(h @ w.T, labels, shard=shard), hidden, mine, grad)
        found[backend] = {"fused": fused, "plain": plain}
    torch.save(found, directory / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two processes found: backend, way -> loss and gradients."""
    directory = tmp_path_factory.mktemp("ranks")
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(directory)]) for rank in range(2)]
    assert [rank.wait(timeout=400) for rank in ranks] == [0, 0]
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("way", ["fused", "plain"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_processes_with_half_the_vocabulary_each_equal_one(backend, way, found):
    hidden, weight, labels, grad = _inputs()
    with use_backend("reference"):
        expected = _results(lambda h, w: cross_entropy(h @ w.T, labels), hidden, weight, grad)
    (loss, hidden_0, weight_0), (loss_1, hidden_1, weight_1) = (rank[backend][way] for rank in found)
    assert torch.equal(loss, loss_1)
    torch.testing.assert_close([loss, hidden_0 + hidden_1, torch.cat((weight_0, weight_1))], expected)


if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]))
