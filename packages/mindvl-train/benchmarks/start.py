# SPDX-License-Identifier: Apache-2.0
"""The start of a rank: processor time of its imports, beside `import torch`, and of what one rank of 1,024 does.

A training run of one step lists the modules; fresh processes then import them in that order. Every process has the
compiled bytecode. Run: mindvl bench start, or python packages/mindvl-train/benchmarks/start.py [--quick] [--json]
"""

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "mindvl-data" / "benchmarks"))

from figures import Figure, median, print_report

HERE = Path(__file__).parent


def main() -> None:
    """Measure and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--train", type=Path, metavar="DIRECTORY", help="train a step there and print the modules")
    parser.add_argument("--time", type=Path, metavar="FILE", help="import the modules of this file in this process")
    arguments = parser.parse_args()
    if arguments.train:
        print(json.dumps(modules_of_a_run(arguments.train)))
    elif arguments.time:
        print(json.dumps(time_imports(json.loads(arguments.time.read_text()))))
    else:
        figures = measure(1 if arguments.quick else 7) + of_a_cluster(arguments.quick)
        print_report(figures, as_json=arguments.json, directory=HERE)


def measure(rounds: int) -> list[Figure]:
    """Medians of processes that do nothing but import."""
    with tempfile.TemporaryDirectory() as directory:
        modules = Path(directory) / "modules.json"
        modules.write_text(_child("--train", directory))
        _child("--time", str(modules))  # writes bytecode that is missing
        runs = [json.loads(_child("--time", str(modules))) for _ in range(rounds)]
    torch, everything = (median(run[key] for run in runs) for key in ("torch", "everything"))
    return [
        Figure(name="import torch", value=torch, unit="s"),
        Figure(
            name="start of a rank",
            value=median(run["everything"] / run["torch"] for run in runs),
            unit="x import torch",
            at_most=1.5,
            note=f"{everything:.2f} s",
        ),
    ]


def of_a_cluster(quick: bool) -> list[Figure]:
    """What one rank of 1,024 does at its start, measured by cluster.py."""
    command = [sys.executable, str(HERE / "cluster.py"), *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=_environment())
    found = json.loads(done.stdout.splitlines()[-1])
    size = f"{found['chunks']:,} chunks"
    return [
        Figure(name="1,024 ranks: groups that a rank creates", value=found["groups"], unit="groups", at_most=10,
               rival="megatron-core", rival_value=found["groups_before"]),
        Figure(name="1,024 ranks: lists of chunks joined", value=found["join_s"], unit="s", at_most=1, note=size),
        Figure(name="1,024 ranks: index read", value=found["read_s"], unit="s", at_most=1, note=size,
               rival="torch's index", rival_value=found["pickle_read_s"]),
        Figure(name="1,024 ranks: torch's index written", value=found["pickle_s"], unit="s",
               note=f"{size}; in a process of its own"),
        Figure(name="weights drawn at random", value=found["draw_s_per_billion"], unit="s per billion",
               note="only those that init does not load"),
    ]  # fmt: skip


def modules_of_a_run(directory: Path) -> list[str]:
    """The modules that one training step has imported, in order."""
    writer = "from pathlib import Path; from samples import write_samples; import sys; "
    writer += "write_samples(Path(sys.argv[1]), [64] * 8, [4] * 8)"
    subprocess.run([sys.executable, "-c", writer, str(directory)], env=_environment(), check=True)
    before = set(sys.modules)
    import torch  # noqa: F401

    from mindvl_train import run_training

    samples = importlib.import_module("samples")  # the configuration; its imports are those of a recipe
    run_training(samples.run_of(directory, "5M", 1, seq_length=128, global_batch_size=1))
    return [name for name in sys.modules if name not in before and name not in ("samples", "__mp_main__")]


def time_imports(names: list[str]) -> dict[str, float]:
    """Processor time in seconds, in this process."""
    start = time.process_time()
    import torch  # noqa: F401

    torch_done = time.process_time()
    from mindvl_model import set_up_device
    from mindvl_train import run_training  # noqa: F401

    set_up_device()
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(ImportError):  # made by its parent, such as six.moves
                importlib.import_module(name)
    return {"torch": torch_done - start, "everything": time.process_time() - start}


def _child(*arguments: str) -> str:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=_environment())
    return done.stdout.splitlines()[-1]


def _environment() -> dict[str, str]:
    """The one of this process, with bytecode and our own directory."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": path}


if __name__ == "__main__":
    main()
