# SPDX-License-Identifier: Apache-2.0
"""A header is believed only if it describes every byte of its file once; anything else is refused in one sentence."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from mindvl_merge import DirectoryError, MergeConfig, MergeError, merge
from mindvl_merge.headers import MAX_HEADER_BYTES, read_header

VALUES = bytes(range(16))


def _entry(dtype="F32", shape=(4,), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def _write(path, header, values=VALUES, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + values)
    return path


def test_a_sound_header_gives_names_shapes_and_places(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "b": _entry("F16", (2,), (12, 16)),
        "a": _entry("I32", (3, 1), (0, 12)),
        "empty": _entry("F32", (0, 5), (12, 12)),
    }
    path = _write(tmp_path / "x.safetensors", json.dumps(header).encode() + b"   ")
    start = path.stat().st_size - 16
    found = {info.name: (info.shape, info.dtype, info.offset - start) for info in read_header(path)}
    assert found == {
        "b": ((2,), np.float16, 12),
        "a": ((3, 1), np.int32, 0),
        "empty": ((0, 5), np.float32, 12),
    }


REPEATED = (
    b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"I32","shape":[4],"data_offsets":[0,16]}}'
)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": _entry(shape=(3,))}, r"tensor a has 16 bytes, but F32 \[3\] needs 12"),
        ({"a": _entry(shape=(2,), offsets=(0, 8)), "b": _entry(shape=(1,), offsets=(12, 16))}, "b leaves 4 unnamed"),
        ({"a": _entry(), "b": _entry()}, "tensor b overlaps a"),
        ({"a": _entry(shape=(2,), offsets=(8, 16))}, "tensor a leaves 8 unnamed bytes after the header"),
        ({"a": _entry(shape=(3,), offsets=(0, 12))}, "bytes, but its header describes"),
        ({"a": _entry(shape=(5,), offsets=(0, 20))}, "bytes, but its header describes"),
        ({"a": _entry(offsets=(16, 0))}, "tensor a has -16 bytes"),
        ({"a": _entry("F4", (32,))}, "dtype 'F4', which is not supported"),
        ({"a": _entry(["F32"])}, r"dtype \['F32'\], which is not supported"),
        ({"a": _entry(shape=(True, 4))}, r"shape \[True, 4\]"),
        ({"a": _entry(shape=(4.0,))}, r"shape \[4.0\]"),
        ({"a": _entry(shape=(-2, -2))}, r"shape \[-2, -2\]"),
        ({"a": _entry(shape=(0, 2**62, 2**62), offsets=(0, 0))}, "has shape"),
        ({"a": _entry(shape=[1] * 40 + [4])}, "has shape"),
        ({"a": _entry(offsets=(0, 16, 3))}, r"data_offsets \[0, 16, 3\]"),
        ({"a": _entry() | {"more": 1}}, "in place of dtype, shape and data_offsets"),
        ({"a": [1, 2]}, r"a has \[1, 2\] in place of"),
        ({"a\n\x1b[31m": _entry()}, "not printable"),
        ({"a": _entry(), "__metadata__": {"n": 1}}, "__metadata__ does not hold texts only"),
        (REPEATED, "key 'a' is repeated"),
        (b"[" * 100_000, "JSON is damaged"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "JSON is damaged"),
        (b'{"a":' + b"1" * 5000 + b"}", "JSON is damaged"),
        (b"[1]", r"must be an object, got \[1\]"),
        (b"\xff\xfe{}", "JSON is damaged"),
        (json.dumps({"a": _entry()}).encode("utf-16"), "JSON is damaged"),
        (json.dumps({"a": _entry()}).encode("utf-8-sig"), "JSON is damaged"),
    ],
)
def test_every_lie_is_refused_in_one_sentence(tmp_path, header, message):
    path = _write(tmp_path / "x.safetensors", header)
    with pytest.raises(DirectoryError, match=message) as caught:
        read_header(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_lengths_that_cannot_be_are_refused_before_anything_is_read(tmp_path):
    path = _write(tmp_path / "x.safetensors", {"a": _entry()}, length=2**63)
    with pytest.raises(DirectoryError, match="end before the header does"):
        read_header(path)
    with open(path, "wb") as file:  # sparse
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(DirectoryError, match=f"at most {MAX_HEADER_BYTES} are read"):
        read_header(path)


def test_a_lie_that_all_models_share_is_refused(tmp_path, make_directory):
    models = [make_directory(name, {"a": torch.ones(4)}) for name in ("x", "y")]
    for model in models:
        _write(model / "model.safetensors", {"a": _entry(shape=(2,), offsets=(8, 16))})
    with pytest.raises(MergeError, match="unnamed bytes"):
        merge(MergeConfig(models=tuple(models), out=tmp_path / "out"))


# Independent of the code under test: the safetensors library reads, torch averages.


def _library_average(models):
    weights = [
        {name: one for file in model.glob("*.safetensors") for name, one in load_file(file).items()} for model in models
    ]
    names = set(weights[0])
    assert all(set(one) == names for one in weights)
    result = {}
    for name in names:
        values = [one[name] for one in weights]
        floating = values[0].is_floating_point()
        result[name] = (sum(v.double() for v in values) / len(values)).to(values[0].dtype) if floating else values[0]
    return result


POOL = [
    *("F32", "F16", "BF16", "I32", "U8", "F8_E4M3", "C64", "f32", "", None, True, 0, 1, -1, 4, 16, 2**31, 2**63, 2**70),
    *(
        1.0,
        1e400,
        float("nan"),
        [],
        {},
        [0, 16],
        [16, 0],
        [4, 1],
        [[4]],
        "../x",
        "/etc/passwd",
        "a\x00b",
        "\ud800",
        "w0",
    ),
    *("part-0.safetensors", "part-1.safetensors", "sub/part-0.safetensors", "..", "part-0.safetensors "),
]


def _mutated(document, draw):
    """One change somewhere in a JSON document, as bytes."""
    document = json.loads(json.dumps(document))
    places = []

    def walk(value):
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(document)
    for _ in range(draw.choice([1, 1, 2])):
        holder, key = draw.choice(places)
        kind = draw.choice(["replace", "nudge", "remove", "swap", "add"])
        if kind == "add" and isinstance(holder, dict):
            holder[draw.choice(["w0", "w9", "dtype", "x\u202e"])] = draw.choice(POOL)
        elif kind == "remove":
            del holder[key]
            return json.dumps(document).encode("utf-8", "surrogatepass")
        elif kind == "swap":
            other, other_key = draw.choice(places)
            holder[key], other[other_key] = json.loads(json.dumps([other[other_key], holder[key]]))
            return json.dumps(document).encode("utf-8", "surrogatepass")
        elif kind == "nudge" and isinstance(holder[key], int):
            holder[key] += draw.choice([-16, -4, -1, 1, 4, 16, 2**40])
        else:
            holder[key] = draw.choice(POOL)
    return json.dumps(document).encode("utf-8", "surrogatepass")


def _damage(path, draw):
    """Change header or bytes of a weight file, or the index, in one of many ways."""
    content = path.read_bytes()
    if path.suffix == ".json":
        changed = _mutated(json.loads(content), draw)
        if draw.random() < 0.3:
            at = draw.randrange(len(content))
            changed = content[:at] + bytes([draw.randrange(256)]) + content[at + draw.choice([0, 1, 5]) :]
        path.write_bytes(changed)
        return
    length = int.from_bytes(content[:8], "little")
    header, values = content[8 : 8 + length], content[8 + length :]
    kind = draw.choice(["json", "json", "json", "header bytes", "length", "cut", "grow"])
    if kind == "json":
        header = _mutated(json.loads(header), draw)
        length = len(header)
    elif kind == "header bytes":
        at = draw.randrange(len(header))
        header = header[:at] + bytes([draw.randrange(256)]) + header[at + 1 :]
    elif kind == "length":
        length = draw.choice([0, 1, length - 1, length + 1, length + 16, 2**32, 2**64 - 1])
    elif kind == "cut":
        values = values[: draw.randrange(len(values))]
    else:
        values += bytes(draw.randrange(1, 40))
    path.write_bytes(length.to_bytes(8, "little") + header + values)


def damaged_merge(root: Path, models: list[Path], draw: random.Random) -> str | None:
    """Merge with one damaged file, in one model or alike in all; returns the refusal, or None for a right result."""
    copies = [root / model.name for model in models]
    for model, copy in zip(models, copies, strict=True):
        shutil.copytree(model, copy)
    name = draw.choice(sorted(path.name for path in models[0].glob("*safetensors*")))
    _damage(copies[0] / name, draw)
    if draw.random() < 0.5:
        for copy in copies[1:]:
            shutil.copyfile(copies[0] / name, copy / name)
    refusal = None
    try:
        merge(MergeConfig(models=tuple(copies), out=root / "out"))
    except MergeError as error:
        refusal = str(error)
    if refusal is not None:
        assert refusal.isprintable()
        assert not list(root.glob("*out*"))
        return refusal
    try:
        expected = _library_average(copies)
    except SafetensorError as error:
        raise AssertionError(f"merged what the library refuses: {error}") from error
    merged = {key: one for file in (root / "out").glob("*.safetensors") for key, one in load_file(file).items()}
    assert merged.keys() == expected.keys()
    for key, value in merged.items():
        assert value.dtype == expected[key].dtype
        assert value.shape == expected[key].shape
        assert torch.equal(value, expected[key])
    return None


@pytest.mark.parametrize("shards", [1, 2])
def test_a_damaged_header_or_index_gives_one_sentence_or_the_right_average(tmp_path, make_directory, shards):
    generator = torch.Generator().manual_seed(3)
    shapes = {"w0": (4,), "w1": (2, 2), "w2": (), "w3": (0, 3), "w4": (3,)}
    models = []
    for name in ("a", "b"):
        tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
        models.append(make_directory(name, tensors | {"n": torch.tensor([1, 2])}, shards=shards))
    draw = random.Random(shards)
    refusals = []
    for number in range(120):
        (tmp_path / str(number)).mkdir()
        refusals.append(damaged_merge(tmp_path / str(number), models, draw))
    assert 60 < len([one for one in refusals if one]) < 120
