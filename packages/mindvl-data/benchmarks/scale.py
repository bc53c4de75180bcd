# SPDX-License-Identifier: Apache-2.0
"""Memory of a loader with thousands of shards; memory and start of a data order over 100 million samples.

Run: python packages/mindvl-data/benchmarks/scale.py [--quick] [--json]
Each measurement runs in its own process. The 100 million samples are 313 sources whose directories link to the same few
files: every source maps its own copy, and all files are in the page cache.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import Figure, print_report

NUM_SHARDS = 2_000
NUM_SOURCES, LINKED_SHARDS, SAMPLES_PER_SHARD = 313, 32, 10_000
RANKS, STEPS = 64, 50
MIB = 1 << 20


def run(*, quick: bool = False) -> list[Figure]:
    """Create the data, then measure in child processes."""
    import photos

    num_shards, num_sources, linked = (200, 32, 4) if quick else (NUM_SHARDS, NUM_SOURCES, LINKED_SHARDS)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        tokenizer = photos.make_tokenizer(root / "tokenizer")
        many = photos.make_source(root / "many", 2 * num_shards, sizes=((56, 84),), num_shards=num_shards)
        loader = child("loader", tokenizer, [many.directory])
        one = photos.make_source(root / "one", SAMPLES_PER_SHARD, sizes=((28, 56),), num_shards=1)
        child("loader", tokenizer, [one.directory])  # measures the text and stores the lengths
        directories = link_sources(one.directory, root / "linked", num_sources=num_sources, shards=linked)
        first, plan = child("plan", tokenizer, directories), child("plan", tokenizer, directories)
    samples = num_sources * linked * SAMPLES_PER_SHARD
    size, base = f"{samples / 1e6:.0f} M samples, {num_sources} sources", "beyond imports"
    return [
        Figure(name=f"loader, {num_shards} shards: resident", value=loader["rss"] / MIB, unit="MiB", at_most=1024,
               note=f"own {loader['uss'] / MIB:.0f}, {base} {(loader['uss'] - loader['uss_imports']) / MIB:.0f}"),
        Figure(name=f"loader, {num_shards} shards: open files", value=loader["open_files"], unit="files"),
        Figure(name="plan: first start ever, to a batch", value=first["start_s"], unit="s",
               note=f"{size}; counts once what later starts read"),
        Figure(name="plan: later starts, to a batch", value=plan["start_s"], unit="s", at_most=5,
               note=f"{plan['start_cpu_s']:.1f} s of processor time"),
        Figure(name="plan: own memory after the start", value=(plan["uss_start"] - plan["uss_imports"]) / MIB,
               unit="MiB", at_most=300, note=f"resident {plan['rss_start'] / MIB:.0f}, mapped files included"),
        Figure(name=f"plan: own memory after {plan['rows']} rows", value=(plan["uss"] - plan["uss_imports"]) / MIB,
               unit="MiB", at_most=300, note=f"resident {plan['rss'] / MIB:.0f}, mapped files included"),
        Figure(name="plan: samples planned", value=plan["planned"] / plan["cpu_s"], unit="samples/s/core",
               note=f"one row in {RANKS} is loaded too"),
    ]  # fmt: skip


def link_sources(directory: Path, out: Path, *, num_sources: int, shards: int) -> list[Path]:
    """Create directories of `shards` shards each, all of them links to the one shard of `directory`."""
    from mindvl_data.shards.sealed import seal

    base = out / "base"
    base.mkdir(parents=True)
    manifest = json.loads((directory / "manifest.json").read_text())
    (entry,) = manifest["shards"]
    stem = entry["name"].removesuffix(".tar")
    entries = []
    for number in range(shards):
        name = f"shard-{number:06d}"
        for path in directory.glob(f"{stem}.*"):
            (base / path.name.replace(stem, name, 1)).symlink_to(path)
        entries.append(entry | {"name": f"{name}.tar"})
    totals = {key: value * shards for key, value in manifest.items() if key != "version" and isinstance(value, int)}
    del manifest["checksum"]
    (base / "manifest.json").write_bytes(seal(manifest | totals | {"shards": entries}))
    links = [out / f"source-{number:03d}" for number in range(num_sources)]
    for link in links:
        link.symlink_to(base)
    return links


def child(what: str, tokenizer: Path, directories: list[Path]) -> dict[str, float]:
    """Run this script in a child process, which measures itself."""
    names = "\n".join(map(str, directories))
    command = [sys.executable, __file__, "--child", what, str(tokenizer)]
    done = subprocess.run(command, input=names, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure_child(what: str, tokenizer: Path, directories: list[Path]) -> dict[str, float]:
    """Memory and times of a loader over the directories: one epoch ("loader") or some packs ("plan")."""
    from transformers import AutoTokenizer

    from mindvl_data import DataConfig, ImageConfig, Loader, PackingConfig, SourceConfig

    AutoTokenizer.from_pretrained(str(tokenizer))  # imports the libraries that every loader needs
    imports = memory()
    config = DataConfig(
        sources=tuple(
            SourceConfig(name=directory.name, path=directory, max_epochs=1 if what == "loader" else None)
            for directory in directories
        ),
        tokenizer=tokenizer,
        packing=PackingConfig(seq_length=8192),
        image=ImageConfig(min_pixels=28 * 28),
    )
    started, start_cpu = time.perf_counter(), time.process_time()
    ranks = RANKS if what == "plan" else 1  # one of many ranks, which orders all packs and loads its own
    with Loader(config, global_batch_size=RANKS, dp_size=ranks, position_kind="rope") as loader:
        next(loader)
        start_s, start_cpu, begin = time.perf_counter() - started, time.process_time() - start_cpu, memory()
        cpu, rows = time.process_time(), 0
        for rows, _ in enumerate(loader, 1):
            if what == "plan" and rows == STEPS:
                break
        cpu, planned = time.process_time() - cpu, loader.report()["samples"]
        end, files = memory(), len(list(Path("/proc/self/fd").iterdir()))
    return {
        "uss_imports": imports[1], "rss_start": begin[0], "uss_start": begin[1], "rss": end[0], "uss": end[1],
        "open_files": files, "start_s": start_s, "start_cpu_s": start_cpu, "cpu_s": cpu,
        "rows": rows * ranks, "planned": planned,
    }  # fmt: skip


def memory() -> tuple[int, int]:
    """(resident, private) bytes of this process; private pages are not shared and not mapped from a file."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["Rss"], sizes["Private_Dirty"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the shards, a hundredth of the samples")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "TOKENIZER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, tokenizer = arguments.child
        directories = [Path(line) for line in sys.stdin.read().splitlines()]
        print(json.dumps(measure_child(what, Path(tokenizer), directories)))
    else:
        print_report(run(quick=arguments.quick), as_json=arguments.json)


if __name__ == "__main__":
    main()
