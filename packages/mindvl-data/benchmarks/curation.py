# SPDX-License-Identifier: Apache-2.0
"""Run the text rules of curation on made records, beside data-juicer on the same rules, records and limits.

Each pipeline runs in its own process tree with one worker and reads and writes files as a user's run does. Throughput per core
is records divided by the processor time of the tree; memory is the largest sum of proportional set sizes. The records that
are kept, and the values of all rules for them, must be equal. Then the same pipeline on a million records, and with two workers
on the local engine and on Ray. Run: mindvl bench curation, or python packages/mindvl-data/benchmarks/curation.py [--quick]
[--json]. data-juicer takes part if `dj-process` of py-data-juicer is on the PATH, for example of its own virtual environment.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import Figure, print_report
from made_texts import flagged_words, write_records

SEED = 0
SAMPLE_S = 0.3  # between two measurements of memory
# data-juicer's filters with the limits that our steps have
OPERATORS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("text_length_filter", {"min_len": 5}),
    ("words_num_filter", {"min_num": 3}),
    ("average_line_length_filter", {"min_len": 10}),
    ("maximum_line_length_filter", {"min_len": 10}),
    ("alphanumeric_filter", {"min_ratio": 0.25}),
    ("special_characters_filter", {"max_ratio": 0.25}),
    ("character_repetition_filter", {"rep_len": 10, "max_ratio": 0.5}),
    ("word_repetition_filter", {"rep_len": 10, "max_ratio": 0.5}),
    ("flagged_words_filter", {"max_ratio": 0.045}),
)
FACTS = {  # statistic of data-juicer -> our fact
    "text_len": "num_characters",
    "num_words": "num_words",
    "avg_line_length": "average_line_length",
    "max_line_length": "longest_line",
    "alnum_ratio": "alphanumeric_ratio",
    "special_char_ratio": "special_ratio",
    "char_rep_ratio": "character_repetition",
    "word_rep_ratio": "word_repetition",
    "flagged_words_ratio": "listed_words_ratio",
}
SPECIAL = """
from data_juicer.ops.common.special_characters import SPECIAL_CHARACTERS
print("SPECIAL", *sorted(ord(character) for character in SPECIAL_CHARACTERS if len(character) == 1))
"""


def main() -> None:
    """Measure and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer records; the figures are not reliable")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--run", nargs=4, metavar=("ENGINE", "WORKERS", "COPIES", "DIRECTORY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        engine, workers, copies, directory = arguments.run
        run_pipeline(engine, int(workers), int(copies), Path(directory))
        return
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(
            Path(directory), count=2000 if arguments.quick else 100_000, copies=4 if arguments.quick else 10
        )
    print_report(figures, as_json=arguments.json)


def run_pipeline(engine: str, workers: int, copies: int, directory: Path) -> None:
    """Run our pipeline on `copies` times the records of the directory."""
    from mindvl_data.curation.config import CurationConfig, InputConfig, StepConfig
    from mindvl_data.curation.pipeline import curate
    from mindvl_data.curation.step import find_step

    special = directory / "special.txt"
    words: dict[str, Any] = {"ideographs_are_words": False}
    own = {"special_characters": special} if special.exists() else {}
    steps: list[tuple[str, dict[str, Any]]] = [
        ("text_length", {"min_characters": 5, "min_words": 3, **words, **own}),
        ("line_length", {"min_average": 10, "min_longest": 10}),
        ("character_ratios", {"min_alphanumeric": 0.25, "max_special": 0.25, **own}),
        ("repetition", {"characters": 10, "max_characters": 0.5, "words": 10, "max_words": 0.5, **words, **own}),
        ("listed_words", {"file": directory / "flagged.txt", "max_ratio": 0.045, **words, **own}),
    ]
    curate(
        CurationConfig(
            name="bench",
            inputs=tuple(
                InputConfig(path=str(directory / "records.jsonl"), format="jsonl", name=f"copy{number}")
                for number in range(copies)
            ),
            steps=tuple(StepConfig(step=name, parameters=find_step(name).config(**given)) for name, given in steps),
            out=directory / f"out-{engine}-{workers}-{copies}",
        ),
        engine="ray" if engine == "ray" else "local",
        workers=workers,
    )


def measure(directory: Path, *, count: int, copies: int) -> list[Figure]:
    """All figures; data-juicer's are left out if it is not installed."""
    write_records(directory / "records.jsonl", count, SEED)
    flagged = flagged_words(SEED)
    (directory / "flagged.txt").write_text("\n".join(flagged), encoding="utf-8")
    rival = shutil.which("dj-process")
    found = None
    if rival:
        write_special(Path(rival), directory)
        found = run_data_juicer(Path(rival), directory, flagged)
    ours = run([sys.executable, __file__, "--run", "local", "1", "1", str(directory)])
    note = ""
    if found:
        kept, same = compare(directory)
        note = f"{kept} of {count} records kept by both, values equal" if same else "DIFFERENT decisions or values"
    figures = [
        Figure(
            name=f"rules on {count} records",
            value=count / ours.cpu_s,
            unit="records/s/core",
            rival="data-juicer",
            rival_value=count / found.cpu_s if found else None,
            ratio_at_least=1.0,
            note=note,
        ),
        Figure(
            name="peak memory, all processes",
            value=ours.peak_bytes / 1e6,
            unit="MB",
            rival="data-juicer",
            rival_value=found.peak_bytes / 1e6 if found else None,
            at_most=found.peak_bytes / 2e6 if found else None,
        ),
    ]
    if found:
        figures.append(
            Figure(name="same decisions and values as data-juicer", value=float(same), unit="", at_least=1.0)
        )
    many = run([sys.executable, __file__, "--run", "local", "1", str(copies), str(directory)])
    shared = copies // 4
    local = run([sys.executable, __file__, "--run", "local", "2", str(shared), str(directory)])
    ray = run([sys.executable, __file__, "--run", "ray", "2", str(shared), str(directory)])
    figures += [
        Figure(
            name=f"rules on {count * copies} records",
            value=count * copies / many.cpu_s,
            unit="records/s/core",
            note=f"{many.wall_s:.0f} s, {many.peak_bytes / 1e6:.0f} MB",
        ),
        Figure(
            name=f"{count * shared} records with 2 workers",
            value=count * shared / local.wall_s,
            unit="records/s",
            rival="Ray engine",
            rival_value=count * shared / ray.wall_s,
            note=f"local {local.wall_s:.0f} s, Ray {ray.wall_s:.0f} s with its start, {ray.peak_bytes / 1e6:.0f} MB",
        ),
    ]
    return figures


def write_special(rival: Path, directory: Path) -> None:
    """Write data-juicer's special characters, which our rules take from a file."""
    done = subprocess.run([rival.parent / "python", "-c", SPECIAL], capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("SPECIAL "))
    text = "".join(f"U+{int(code):04X}\n" for code in line.split()[1:])
    (directory / "special.txt").write_text(text, encoding="utf-8")


def run_data_juicer(rival: Path, directory: Path, flagged: list[str]) -> "Cost":
    """Run data-juicer's filters with one process, without cache and tracing."""
    lists = directory / "lists"
    lists.mkdir()
    (lists / "flagged_words.json").write_text(json.dumps({"en": flagged}), encoding="utf-8")
    extra = {"flagged_words_filter": {"flagged_words_dir": str(lists)}}
    config = {
        "project_name": "bench",
        "dataset_path": str(directory / "records.jsonl"),
        "export_path": str(directory / "rival" / "kept.jsonl"),
        "np": 1,
        "use_cache": False,
        "open_monitor": False,
        "auto_op_parallelism": False,
        "keep_stats_in_res_ds": True,
        "process": [{name: given | extra.get(name, {})} for name, given in OPERATORS],
    }
    file = directory / "data-juicer.yaml"
    file.write_text(json.dumps(config), encoding="utf-8")
    return run([str(rival), "--config", str(file)], HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=str(directory / "hf"))


def compare(directory: Path) -> tuple[int, bool]:
    """Records that both keep, and whether they are the same with the same values of all rules."""
    found: dict[str, dict[str, float]] = {}
    for shard in sorted((directory / "out-local-1-1" / "shards").glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                content = tar.extractfile(member)
                if content is not None and member.name.endswith(".json"):
                    record = json.loads(content.read())
                    found[record["id"]] = record["meta"]["curation"]
    lines = (directory / "rival" / "kept.jsonl").read_text(encoding="utf-8").splitlines()
    stats = (directory / "rival" / "kept_stats.jsonl").read_text(encoding="utf-8").splitlines()
    names = (str(json.loads(line)["id"]) for line in lines)
    kept = {name: json.loads(values)["__dj__stats__"] for name, values in zip(names, stats, strict=True)}
    same = found.keys() == kept.keys() and all(
        abs(values[theirs] - found[name][ours]) < 2e-6
        for name, values in kept.items()
        for theirs, ours in FACTS.items()
    )
    return len(kept.keys() & found.keys()), same


@dataclass(frozen=True)
class Cost:
    """Cost of a process with all processes that it starts."""

    cpu_s: float
    wall_s: float
    peak_bytes: int


def run(command: list[str], **variables: str) -> Cost:
    """Run a command and measure its process tree; its output goes to a file that is printed if it fails."""
    start, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | variables)
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            peak = max(peak, sum(map(_proportional_bytes, _tree(process.pid))))
            time.sleep(SAMPLE_S)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace")[-5000:])
            raise SystemExit(f"{command[0]}: ended with exit code {process.returncode}. Read its output above.")
    return Cost(usage.ru_utime + usage.ru_stime, time.perf_counter() - start, peak)


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            children = Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii").split()
            found += [one for child in children for one in _tree(int(child))]
    return found


def _proportional_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
