# SPDX-License-Identifier: Apache-2.0
"""A whole merge: values, files, provenance, memory, and what a failure leaves behind."""

import errno
import json
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mindvl_merge import MergeConfig, MergeError, blocks, directory_digest, merge, run
from mindvl_merge.directory import ModelDirectory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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
    tensors = {**random_tensors(0), "empty": torch.zeros(0, 3), "on": torch.tensor([True])}
    model = make_directory("a", tensors, shards=2)
    (model / "chat_templates").mkdir()
    (model / "chat_templates" / "default.jinja").write_text("x")
    merge(MergeConfig(models=(model,), out=tmp_path / "deep" / "out", max_shard_bytes=80))
    out = tmp_path / "deep" / "out"
    written = {name: one for file in out.glob("*.safetensors") for name, one in load_file(file).items()}
    assert len(list(out.glob("*.safetensors"))) > 1
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(one.numel() * one.element_size() for one in tensors.values())
    for file in ("config.json", "tokenizer.json", "modeling_tiny.py", "chat_templates/default.jinja"):
        assert (out / file).read_bytes() == (model / file).read_bytes()
    assert sorted(one.name for one in out.iterdir() if one.name.startswith(("part", "journal"))) == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["average", "ties", "dare_ties"])
def test_the_result_depends_on_no_file_layout(tmp_path, make_directory, method):
    generator = torch.Generator().manual_seed(0)
    shape = {"w": (3000, 700), "v": (5,)}
    models = [{name: torch.randn(one, generator=generator) for name, one in shape.items()} for _ in range(3)]
    digests, bytes_of = [], []
    for layout, shards in (("x", 1), ("y", 2)):
        paths = []
        for number, tensors in enumerate(models):
            ordered = dict(reversed(tensors.items())) if shards == 2 else tensors
            paths.append(make_directory(f"{layout}{number}", ordered, shards=shards))
        base = paths.pop() if method != "average" else None
        document = merge(MergeConfig(models=tuple(paths), base=base, out=tmp_path / f"{layout}out", method=method))
        digests.append((document["digest"], [one["digest"] for one in document["models"]]))
        bytes_of.append(load_file(tmp_path / f"{layout}out" / "model.safetensors")["w"])
    assert digests[0] == digests[1]
    assert torch.equal(*bytes_of)


def test_the_manifest_names_parents_weights_digests_and_the_command(tmp_path, make_directory, random_tensors):
    models = tuple(make_directory(f"m{i}", random_tensors(i)) for i in range(2))
    document = merge(MergeConfig(models=models, out=tmp_path / "out", part_weights={"vision.": (1.0, 0.0)}))
    assert document == json.loads((tmp_path / "out" / "merge.json").read_text())
    expected = {"path": str(models[1]), "weight": 0.5, "digest": directory_digest(models[1]), "complete": True}
    assert document["models"][1] == expected
    assert document["digest"] == directory_digest(tmp_path / "out")
    assert (document["num_merged"], document["num_copied"], document["unused"]) == (4, 0, [])
    assert document["command"] == (
        f"mindvl merge {models[0]} {models[1]} --out {tmp_path / 'out'} --weights vision.=1.0,0.0"
    )
    rules = [document["rules"][document["tensors"][name]["rule"]] for name in ("vision.conv", "language.norm")]
    assert [rule["weights"] for rule in rules] == [[1.0, 0.0], [0.5, 0.5]]


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

    monkeypatch.setattr(blocks.BlockMaker, "make", fail)
    with pytest.raises(MergeError, match="disk full"):
        merge(MergeConfig(models=(model,), out=tmp_path / "out", overwrite=True))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


KILLED = """
import os, sys
from pathlib import Path
from mindvl_merge import MergeConfig, merge, run
run._COMMIT_BYTES = 1
def kill(done, total):
    if done > total // 2:
        os.kill(os.getpid(), 9)
merge(MergeConfig(models=tuple(map(Path, sys.argv[2:])), out=Path(sys.argv[1])), progress=kill)
"""


def test_a_killed_merge_continues_and_ends_with_the_same_bytes(tmp_path, make_directory, monkeypatch):
    models = tuple(make_directory(f"m{i}", {f"w{k}": torch.randn(50, 40) for k in range(9)}) for i in range(2))
    whole = merge(MergeConfig(models=models, out=tmp_path / "whole"))
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "out", *models], check=False)
    assert done.returncode == -9
    assert not (tmp_path / "out").exists()
    journal = (tmp_path / ".out.partial" / "journal.jsonl").read_text().splitlines()
    assert len(journal) > 4
    made = []
    make = blocks.BlockMaker.make
    monkeypatch.setattr(
        blocks.BlockMaker, "make", lambda self, tensor, *rest: (made.append(tensor), make(self, tensor, *rest))[1]
    )
    continued = merge(MergeConfig(models=models, out=tmp_path / "out"))
    assert 0 < len(made) <= 9 - (len(journal) - 1)
    assert continued["digest"] == whole["digest"]
    assert continued["models"] == whole["models"]
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert one == two


def test_a_merge_of_other_models_does_not_continue(tmp_path, make_directory):
    models = tuple(make_directory(f"m{i}", {f"w{k}": torch.randn(50, 40) for k in range(9)}) for i in range(3))
    subprocess.run([sys.executable, "-c", KILLED, tmp_path / "out", *models[:2]], check=False)
    merge(MergeConfig(models=models[1:], out=tmp_path / "out"))
    merged = load_file(tmp_path / "out" / "model.safetensors")["w0"]
    expected = sum(load_file(m / "model.safetensors")["w0"].double() for m in models[1:]) / 2
    torch.testing.assert_close(merged, expected.float())


def test_memory_is_that_of_blocks_not_of_models(tmp_path, make_directory, monkeypatch):
    rows = 4096
    models = tuple(make_directory(f"m{i}", {f"w{k}": torch.randn(rows, 64) for k in range(4)}) for i in range(3))
    monkeypatch.setattr(blocks, "CHUNK_VALUES", 1024)
    sizes = []
    original = ModelDirectory.read

    def counting(self, name, start, stop, into=None):
        values = original(self, name, start, stop, into)
        sizes.append(values.nbytes)
        return values

    monkeypatch.setattr(ModelDirectory, "read", counting)
    tracemalloc.start()
    merge(MergeConfig(models=models, out=tmp_path / "out"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(sizes) == 3 * 4 * rows * 64 // 1024
    assert max(sizes) <= 1024 * 4
    assert peak < 1_500_000  # one model has 4 MB
    merged = load_file(tmp_path / "out" / "model.safetensors")
    expected = sum(load_file(m / "model.safetensors")["w2"].double() for m in models) / 3
    torch.testing.assert_close(merged["w2"], expected.float())


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path, make_directory, monkeypatch):
    model = make_directory("a", {"w": torch.randn(1000, 100)})
    usage = type("Usage", (), {"free": 100_000})()
    monkeypatch.setattr(run.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(MergeError, match=r"out: the result needs 0\.4 MB, but 0\.1 MB are free there"):
        merge(MergeConfig(models=(model,), out=tmp_path / "out"))
    assert not list(tmp_path.glob(".out*"))


def _sparse_model(path, tensors):
    """A file with a whole header whose values are a hole, and 1.0 in the first value of each tensor."""
    path.mkdir()
    header, offset = {}, 0
    for name, shape in tensors.items():
        size = 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in header.values():
            file.seek(8 + len(text) + entry["data_offsets"][0])
            file.write(np.array([1.0], ml_dtypes.bfloat16).tobytes())
        file.truncate(8 + len(text) + offset)
    return path


def test_sparse_models_far_larger_than_memory_are_merged(tmp_path):
    """15 GB each; the result has the same holes."""
    shapes = {f"model.layers.{layer}.mlp.weight": (50_000, 30_000) for layer in range(5)}
    models = tuple(_sparse_model(tmp_path / name, shapes) for name in "ab")
    document = merge(MergeConfig(models=models, out=tmp_path / "out", max_shard_bytes=4_000_000_000))
    with ModelDirectory(tmp_path / "out") as merged:
        assert len(merged.files) == 5
        assert merged.read("model.layers.3.mlp.weight", 0, 3).tolist() == [1, 0, 0]
        assert sum(merged.allocated_bytes(file) for file in merged.files) < 1_000_000_000
    assert document["num_merged"] == 5


def test_progress_ends_at_the_whole(tmp_path, make_directory, random_tensors):
    calls = []
    merge(
        MergeConfig(models=(make_directory("a", random_tensors(0)),), out=tmp_path / "out"),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls[-1] == (57 * 4, 57 * 4)


def test_a_merge_imports_no_torch(tmp_path, make_directory, random_tensors):
    path = tmp_path / "a"
    path.mkdir()
    save_file(random_tensors(0), path / "model.safetensors")
    code = (
        "import sys; from pathlib import Path; from mindvl_merge import MergeConfig, merge; "
        "merge(MergeConfig(models=(Path(sys.argv[1]),), out=Path(sys.argv[2]))); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, path, tmp_path / "out"], check=True)


def test_a_failure_while_other_files_are_copied_repeats_no_tensor(
    tmp_path, make_directory, random_tensors, monkeypatch
):
    models = tuple(make_directory(name, random_tensors(seed)) for seed, name in enumerate("ab"))
    config = MergeConfig(models=models, out=tmp_path / "out")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run.shutil, "copyfile", fail)
    with pytest.raises(MergeError, match="the same command continues where this one ended"):
        merge(config)
    monkeypatch.undo()
    monkeypatch.setattr(blocks.BlockMaker, "make", lambda *_: pytest.fail("a tensor was merged again"))
    merge(config)
    average = (random_tensors(0)["language.norm"] + random_tensors(1)["language.norm"]) / 2
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["language.norm"], average)
    assert not (tmp_path / "out" / "journal.jsonl").exists()
