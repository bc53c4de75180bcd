# SPDX-License-Identifier: Apache-2.0
"""Blocks: chunks and holes change neither values nor digests."""

import pytest
import torch
from safetensors.torch import load_file

from mindvl_merge import MergeConfig, blocks, digests, merge
from mindvl_merge.directory import ModelDirectory


@pytest.mark.parametrize("method", ["average", "slerp"])
def test_the_size_of_chunks_changes_nothing(tmp_path, make_directory, monkeypatch, method):
    generator = torch.Generator().manual_seed(0)
    models = [make_directory(name, {"w": torch.randn(300, 77, generator=generator).bfloat16()}) for name in "ab"]
    documents = []
    for size in (2**16, 1000, 7):
        monkeypatch.setattr(blocks, "CHUNK_VALUES", size)
        documents.append(merge(MergeConfig(models=tuple(models), out=tmp_path / f"{size}", method=method)))
    assert len({document["digest"] for document in documents}) == 1
    assert len({str([model["digest"] for model in document["models"]]) for document in documents}) == 1


def test_holes_are_the_zeros_that_they_stand_for(tmp_path, make_directory, monkeypatch):
    models = tuple(make_directory(name, {"w": torch.zeros(50, 50)}) for name in "ab")
    expected = merge(MergeConfig(models=models, out=tmp_path / "read"))
    monkeypatch.setattr(ModelDirectory, "is_hole", lambda self, name, start, stop: True)
    document = merge(MergeConfig(models=models, out=tmp_path / "skipped"))
    assert (document["digest"], document["models"]) == (expected["digest"], expected["models"])
    assert not load_file(tmp_path / "skipped" / "model.safetensors")["w"].any()


def test_ties_needs_no_more_than_passes_over_blocks(tmp_path, make_directory):
    """Against the definition on whole tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(200, 30, generator=generator) for _ in range(3)]
    paths = [make_directory(name, {"w": one}) for name, one in zip("abc", tensors, strict=True)]
    merge(MergeConfig(models=tuple(paths[:2]), base=paths[2], out=tmp_path / "out", method="ties", density=0.3))
    deltas = [one.double() - tensors[2].double() for one in tensors[:2]]
    kept = []
    for delta in deltas:
        limit = delta.abs().flatten().sort(descending=True).values[int(0.3 * delta.numel()) - 1]
        kept.append(torch.where(delta.abs() >= limit, delta, 0.0))
    sign = torch.where(kept[0] + kept[1] >= 0, 1.0, -1.0)
    agree = [torch.where(delta * sign > 0, delta, 0.0) for delta in kept]
    count = sum((delta != 0).double() for delta in agree).clamp(min=1)
    expected = tensors[2].double() + sum(agree) / count
    merged = load_file(tmp_path / "out" / "model.safetensors")["w"]
    torch.testing.assert_close(merged.double(), expected, rtol=1e-6, atol=1e-6)


def test_the_values_that_dare_drops_depend_on_their_place_and_not_on_the_spelling_of_the_name(
    tmp_path, make_directory, monkeypatch
):
    monkeypatch.setattr(digests, "BLOCK_VALUES", 64)
    paths = {}
    for spelling, name in (("old", "visual.w"), ("new", "model.visual.w")):
        config = {"model_type": "tiny", "dtype": "float32"}
        pair = [
            make_directory(f"{spelling}-{value}", {name: torch.full((2, 64), float(value))}, config=config)
            for value in (0, 1)
        ]
        out = tmp_path / f"{spelling}-out"
        merge(MergeConfig(models=(pair[1],), base=pair[0], out=out, method="dare_linear"))
        paths[spelling] = load_file(out / "model.safetensors")[name]
    assert torch.equal(paths["old"], paths["new"])
    first, second = paths["old"]  # two blocks
    assert not torch.equal(first, second)
