# SPDX-License-Identifier: Apache-2.0
"""Merge three directories with the tensors of DeepSeek-V3 (1.37 TB each) in a process of at most 16 GB.

The files are sparse: embedding and first layer have random values at their true size (about 3 GB in each directory), all other
tensors are holes, which the merge recognizes, so that they need no disk. Headers, pairing, journal, digests, index and
manifest are those of the whole model; arithmetic and I/O are those of the filled tensors. The merged values of the filled
tensors are compared with an average that is computed here.

Run: python packages/mindvl-merge/benchmarks/large_merge.py [--at DIRECTORY] [--layers 61]
"""

import argparse
import json
import sys
import tempfile
import time
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "mindvl-data" / "benchmarks"))

from figures import Figure, print_report
from merge import OURS, run

NUM_MODELS, NUM_SHARDS, LIMIT_BYTES = 3, 163, 16 * 10**9
HIDDEN, VOCABULARY, NUM_EXPERTS = 7168, 129280, 256
LIMITED = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({LIMIT_BYTES}, {LIMIT_BYTES}))\n" + OURS
FILLED = ("model.embed_tokens.", "model.layers.0.")
SLICE = 2**20  # values compared at the begin and the end of each filled tensor

Shape = tuple[int, ...]


def main() -> None:
    """Measure and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", type=Path, help="directory for the models; default: a temporary one")
    parser.add_argument("--layers", type=int, default=61, help="layers before the layer of multi-token prediction")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.at) as directory:
        figures = measure(Path(directory), tensor_shapes(arguments.layers))
    print_report(figures, as_json=arguments.json, directory=Path(__file__).parent)


def measure(directory: Path, shapes: dict[str, Shape]) -> list[Figure]:
    """One merge, and the largest difference of its filled tensors from the average."""
    models = [write_model(directory / f"m{number}", number, shapes) for number in range(NUM_MODELS)]
    out = directory / "out"
    started = time.perf_counter()
    seconds, memory = run([sys.executable, "-c", LIMITED, str(out), *map(str, models)])
    wall = time.perf_counter() - started
    total = 2 * sum(map(prod, shapes.values()))
    compare(out, models, shapes)
    manifest = json.loads((out / "merge.json").read_text())
    if manifest["num_merged"] != len(shapes) or manifest["unused"]:
        raise SystemExit(f"{out}: merged {manifest['num_merged']} of {len(shapes)} tensors.")
    filled = 2 * sum(prod(shape) for name, shape in shapes.items() if name.startswith(FILLED))
    note = f"{len(shapes):,} tensors, {total / 1e12:.2f} TB an input, of which {filled / 1e9:.1f} GB are filled"
    return [
        Figure(name="resident memory", value=memory / 1e6, unit="MB", at_most=500, note=note),
        Figure(name="processor time", value=seconds, unit="s", note=f"{wall:.0f} s of wall time"),
    ]


def write_model(path: Path, seed: int, shapes: dict[str, Shape]) -> Path:
    """A directory of sparse shards."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "hidden_size": HIDDEN}))
    names, weight_map, generator = list(shapes), {}, np.random.default_rng(seed)
    for shard in range(NUM_SHARDS):
        mine, header, offset = names[shard::NUM_SHARDS], {}, 0
        for name in mine:
            end = offset + 2 * prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file = path / f"model-{shard + 1:05d}-of-{NUM_SHARDS:06d}.safetensors"
        with open(file, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + offset)
            for name in mine:
                if name.startswith(FILLED):
                    stream.seek(8 + len(text) + header[name]["data_offsets"][0])
                    for start in range(0, prod(shapes[name]), SLICE):
                        count = min(SLICE, prod(shapes[name]) - start)
                        values = generator.standard_normal(count, np.float32)
                        stream.write(values.astype(ml_dtypes.bfloat16).tobytes())
        weight_map |= dict.fromkeys(mine, file.name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def compare(out: Path, models: list[Path], shapes: dict[str, Shape]) -> None:
    """Check both ends of every filled tensor, and that a tensor of holes has zeros."""
    last = next(reversed(shapes))
    for name in [*(name for name in shapes if name.startswith(FILLED)), last]:
        count = prod(shapes[name])
        for start in {0, max(0, count - SLICE)}:
            stop = min(count, start + SLICE)
            wide = [read(model, name, start, stop).astype(np.float64) for model in models]
            if not np.array_equal(read(out, name, start, stop), np.mean(wide, axis=0).astype(ml_dtypes.bfloat16)):
                raise SystemExit(f"{out}: tensor {name} is not the average.")


def read(path: Path, name: str, start: int, stop: int) -> np.ndarray:
    """Values of a tensor, by the headers of the files."""
    index = json.loads((path / "model.safetensors.index.json").read_text())
    with open(path / index["weight_map"][name], "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        offset = json.loads(file.read(size))[name]["data_offsets"][0]
        file.seek(8 + size + offset + 2 * start)
        return np.frombuffer(file.read(2 * (stop - start)), ml_dtypes.bfloat16)


def tensor_shapes(num_layers: int) -> dict[str, Shape]:
    """Names and shapes of DeepSeek-V3 in bfloat16, with its layer of multi-token prediction."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(num_layers + 1):
        start = f"model.layers.{layer}."
        attention = {
            "q_a_proj": (1536, HIDDEN), "q_a_layernorm": (1536,), "q_b_proj": (24576, 1536), "kv_a_proj_with_mqa": (576, HIDDEN),
            "kv_a_layernorm": (512,), "kv_b_proj": (32768, 512), "o_proj": (HIDDEN, 16384),
        }  # fmt: skip
        shapes |= {f"{start}self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{start}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
        if layer < 3:
            shapes |= _mlp(f"{start}mlp.", 18432)
            continue
        shapes |= {f"{start}mlp.gate.weight": (NUM_EXPERTS, HIDDEN)}
        shapes |= {f"{start}mlp.gate.e_score_correction_bias": (NUM_EXPERTS,)}
        for expert in (*(f"experts.{number}" for number in range(NUM_EXPERTS)), "shared_experts"):
            shapes |= _mlp(f"{start}mlp.{expert}.", 2048)
        if layer == num_layers:
            shapes |= {f"{start}{name}.weight": (HIDDEN,) for name in ("enorm", "hnorm", "shared_head.norm")}
            shapes |= {f"{start}eh_proj.weight": (HIDDEN, 2 * HIDDEN)}
            shapes |= {f"{start}{name}.weight": (VOCABULARY, HIDDEN) for name in ("embed_tokens", "shared_head.head")}
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def _mlp(start: str, size: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{start}{name}_proj.weight": (size, HIDDEN) for name in ("gate", "up")}
    return shapes | {f"{start}down_proj.weight": (HIDDEN, size)}


if __name__ == "__main__":
    main()
