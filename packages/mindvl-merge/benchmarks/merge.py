# SPDX-License-Identifier: Apache-2.0
"""Merge three bfloat16 directories of five shards, beside plain reading and writing of the same bytes, and mergekit.

Every way runs in its own process, in turn, on files that are in the page cache; the figures are medians of processor time of
the whole process. "Plain" reads all inputs with two threads in pieces of 16 MiB, then writes as many bytes as the result has
and syncs them. Run: mindvl bench merge, or python packages/mindvl-merge/benchmarks/merge.py [--quick] [--json]. mergekit takes
part if `mergekit-yaml` is on the PATH.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "mindvl-data" / "benchmarks"))

from figures import Figure, median, print_report

NUM_MODELS, NUM_SHARDS = 3, 5
HIDDEN, WIDE = 2048, 4096

PLAIN = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
def read(path):
    piece = bytearray(16 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(piece):
            pass
out, total, *paths = sys.argv[1:]
with ThreadPoolExecutor(2) as pool:
    list(pool.map(read, paths))
piece = os.urandom(16 << 20)
with open(out, "wb", buffering=0) as file:
    for start in range(0, int(total), len(piece)):
        file.write(piece[:int(total) - start])
    os.fsync(file.fileno())
"""
OURS = """
import sys
from pathlib import Path
from mindvl_merge import MergeConfig, merge
merge(MergeConfig(models=tuple(map(Path, sys.argv[2:])), out=Path(sys.argv[1])))
"""


def main() -> None:
    """Measure and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round on small models")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--at", type=Path, help="directory for the models, on the disk to measure; default: a temporary one"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.at) as directory:
        figures = measure(Path(directory), rounds=1 if arguments.quick else 5, layers=2 if arguments.quick else 25)
    print_report(figures, as_json=arguments.json, directory=Path(__file__).parent)


def measure(directory: Path, *, rounds: int, layers: int) -> list[Figure]:
    """Medians of alternating runs."""
    models = [write_model(directory / f"m{number}", number, layers) for number in range(NUM_MODELS)]
    files = [str(file) for model in models for file in sorted(model.glob("*.safetensors"))]
    total = sum(Path(file).stat().st_size for file in files) // NUM_MODELS
    out = directory / "out"
    ways = {
        "plain": [sys.executable, "-c", PLAIN, str(out), str(total), *files],
        "ours": [sys.executable, "-c", OURS, str(out), *map(str, models)],
    }
    rival = shutil.which("mergekit-yaml")
    if rival:
        recipe = directory / "merge.yaml"
        recipe.write_text(json.dumps({
            "merge_method": "linear", "dtype": "bfloat16",
            "models": [{"model": str(model), "parameters": {"weight": 1.0}} for model in models],
        }))  # fmt: skip
        ways["mergekit"] = [rival, str(recipe), str(out), "--lazy-unpickle"]
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, command in ways.items():
            cost = run(command)
            shutil.rmtree(out) if out.is_dir() else out.unlink()
            if number:  # the first round fills the page cache
                runs[name].append(cost)
    seconds = {name: median(one[0] for one in found) for name, found in runs.items()}
    memory = max(one[1] for one in runs["ours"])
    figures = [
        Figure(
            name=f"merge of {NUM_MODELS} models of {total / 1e9:.1f} GB",
            value=seconds["ours"] / seconds["plain"],
            unit="x processor time",
            at_most=1.3,
            rival="reading and writing",
            note=f"{seconds['ours']:.2f} s, plain {seconds['plain']:.2f} s",
        ),
        Figure(name="resident memory", value=memory / 1e6, unit="MB", at_most=500),
    ]
    if rival:
        ratio = seconds["ours"] / seconds["mergekit"]
        figures.append(
            Figure(
                name="merge",
                value=ratio,
                unit="x processor time",
                rival="mergekit",
                note=f"{seconds['mergekit']:.2f} s",
            )
        )
    return figures


def run(command: list[str]) -> tuple[float, float]:
    """Processor seconds and maximum resident bytes of a process."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{command[0]}: exit code {process.returncode}: {output.read().decode()[-2000:]}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * (1024 if sys.platform != "darwin" else 1)


def write_model(path: Path, seed: int, layers: int) -> Path:
    """A Llama directory in bfloat16 with random weights in five shards."""
    path.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, "hidden_size": HIDDEN,
        "intermediate_size": WIDE, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 64,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    names = tensor_shapes(layers)
    generator, weight_map = np.random.default_rng(seed), {}
    for shard in range(NUM_SHARDS):
        file = f"model-{shard + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        mine = dict(list(names.items())[shard::NUM_SHARDS])
        header, offset = {}, 0
        for name, shape in mine.items():
            end = offset + 2 * prod(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path / file, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for shape in mine.values():
                values = generator.standard_normal(shape, np.float32) * np.float32(0.02)
                stream.write(values.astype(ml_dtypes.bfloat16).tobytes())
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {"total_size": sum(2 * prod(shape) for shape in names.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def tensor_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama model with a small vocabulary."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, HIDDEN), "lm_head.weight": (64, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(layers):
        start = f"model.layers.{layer}."
        shapes |= {f"{start}self_attn.{one}_proj.weight": (HIDDEN, HIDDEN) for one in "qkvo"}
        shapes |= {f"{start}mlp.{one}_proj.weight": (WIDE, HIDDEN) for one in ("gate", "up")}
        shapes[f"{start}mlp.down_proj.weight"] = (HIDDEN, WIDE)
        shapes |= {f"{start}{one}_layernorm.weight": (HIDDEN,) for one in ("input", "post_attention")}
    return shapes


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
