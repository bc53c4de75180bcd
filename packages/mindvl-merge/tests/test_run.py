# SPDX-License-Identifier: Apache-2.0
"""A whole merge: values, files, provenance, memory, and what a failure leaves behind."""

import hashlib
import json
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mindvl_merge import MergeConfig, MergeError, merge, run
from mindvl_merge.directory import ModelDirectory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 2])
def test_the_average_is_that_of_numpy(tmp_path, make_directory, random_tensors, dtype, shards):
    tensors = [random_tensors(seed, dtype) for seed in range(3)]
    models = tuple(make_directory(f"m{i}", t, shards=shards) for i, t in enumerate(tensors))
    merge(MergeConfig(models=models, out=tmp_path / "out", weights=(0.5, 0.25, 0.25)))
    merged = load_file(tmp_path / "out" / "model.safetensors")
    for name in tensors[0]:
        a, b, c = (t[name].double().numpy() for t in tensors)
        expected = torch.tensor(np.asarray(0.5 * a + 0.25 * b + 0.25 * c)).to(dtype)
        assert merged[name].dtype == dtype
        assert torch.equal(merged[name], expected)


def test_one_model_comes_out_unchanged_with_its_other_files(tmp_path, make_directory, random_tensors):
    tensors = random_tensors(0)
    model = make_directory("a", tensors, shards=2)
    (model / "chat_templates").mkdir()
    (model / "chat_templates" / "default.jinja").write_text("x")
    merge(MergeConfig(models=(model,), out=tmp_path / "deep" / "out", max_shard_bytes=80))
    copy = ModelDirectory(tmp_path / "deep" / "out")
    assert len(copy.files) > 1
    assert all(torch.equal(copy.read_rows(name, 0, 99), tensors[name]) for name in tensors)
    for file in ("config.json", "tokenizer.json", "modeling_tiny.py", "chat_templates/default.jinja"):
        assert (copy.path / file).read_bytes() == (model / file).read_bytes()
    assert not (copy.path / "part-0.safetensors").exists()


def test_two_runs_write_the_same_bytes(tmp_path, make_directory, random_tensors):
    models = tuple(make_directory(f"m{i}", random_tensors(i)) for i in range(3))
    hashes = [merge(MergeConfig(models=models, out=tmp_path / name))["sha256"] for name in ("x", "y")]
    assert hashes[0] == hashes[1]


def test_the_manifest_tells_parents_weights_and_hashes(tmp_path, make_directory, random_tensors):
    models = tuple(make_directory(f"m{i}", random_tensors(i)) for i in range(2))
    manifest = merge(MergeConfig(models=models, out=tmp_path / "out"))
    assert manifest == json.loads((tmp_path / "out" / "merge.json").read_text())
    digest = hashlib.sha256((models[1] / "model.safetensors").read_bytes()).hexdigest()
    assert manifest["models"][1] == {"path": str(models[1]), "weight": 0.5, "sha256": {"model.safetensors": digest}}
    assert (manifest["num_merged"], manifest["num_copied"]) == (4, 0)


def test_only_named_components_are_merged(tmp_path, make_directory, random_tensors):
    tensors = [random_tensors(0), random_tensors(1)]
    models = tuple(make_directory(f"m{i}", t) for i, t in enumerate(tensors))
    merge(MergeConfig(models=models, out=tmp_path / "out", only=("language.",)))
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(merged["vision.conv"], tensors[0]["vision.conv"])
    torch.testing.assert_close(merged["language.norm"], (tensors[0]["language.norm"] + tensors[1]["language.norm"]) / 2)


def test_another_type_is_written_into_the_configuration_too(tmp_path, make_directory, random_tensors):
    config = {"dtype": "float32", "text_config": {"dtype": "float32", "hidden_size": 4}}
    models = (
        make_directory("a", random_tensors(0), config=config),
        make_directory("b", random_tensors(1, torch.bfloat16), config=config),
    )
    merge(MergeConfig(models=models, out=tmp_path / "out", dtype="bf16"))
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "hidden_size": 4}}


def test_integers_are_copied_when_equal_and_refused_when_not(tmp_path, make_directory):
    models = [make_directory(f"m{i}", {"steps": torch.tensor([7, i // 2])}) for i in range(3)]
    merge(MergeConfig(models=tuple(models[:2]), out=tmp_path / "out"))
    assert load_file(tmp_path / "out" / "model.safetensors")["steps"].tolist() == [7, 0]
    with pytest.raises(MergeError, match=r"m2.model\.safetensors: integer tensor steps differs"):
        merge(MergeConfig(models=tuple(models), out=tmp_path / "out2"))
    assert not (tmp_path / "out2").exists()
    assert not (tmp_path / ".out2.partial").exists()


def test_a_failure_keeps_the_old_output(tmp_path, make_directory, random_tensors, monkeypatch):
    model = make_directory("a", random_tensors(0))
    merge(MergeConfig(models=(model,), out=tmp_path / "out"))
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(run, "_make_piece", fail)
    with pytest.raises(MergeError, match="disk full"):
        merge(MergeConfig(models=(model,), out=tmp_path / "out", overwrite=True))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_memory_is_that_of_pieces_not_of_models(tmp_path, make_directory, monkeypatch):
    """tracemalloc sees the bytes that are read, not what torch makes of them, so pieces are measured as well."""
    rows = 4096
    models = tuple(make_directory(f"m{i}", {f"w{k}": torch.randn(rows, 64) for k in range(4)}) for i in range(3))
    monkeypatch.setattr(run, "_PIECE_ELEMENTS", 1024)
    sizes = []
    original = ModelDirectory.read_rows

    def counting(self, name, start, stop):
        piece = original(self, name, start, stop)
        sizes.append(piece.nbytes)
        return piece

    monkeypatch.setattr(ModelDirectory, "read_rows", counting)
    tracemalloc.start()
    merge(MergeConfig(models=models, out=tmp_path / "out"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(sizes) == 3 * 4 * rows * 64 // 1024
    assert max(sizes) <= 1024 * 4
    assert peak < 1_000_000  # one model has 4 MB
    merged = load_file(tmp_path / "out" / "model.safetensors")
    expected = sum(load_file(m / "model.safetensors")["w2"].double() for m in models) / 3
    torch.testing.assert_close(merged["w2"], expected.float())


def test_progress_ends_at_the_whole(tmp_path, make_directory, random_tensors):
    calls = []
    merge(
        MergeConfig(models=(make_directory("a", random_tensors(0)),), out=tmp_path / "out"),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls[-1] == (57 * 4, 57 * 4)
