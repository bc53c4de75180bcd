# SPDX-License-Identifier: Apache-2.0
"""Training steps beside transformers: equal packs, the usual padded batch, and what our loop adds to bare PyTorch.

Every figure runs in processes of its own, ours and the rival in turn. Time is processor time of the training thread
on a CPU, where forward, backward and update all run; images are decoded by other threads for ours, and before the
clock for the rivals. Run: mindvl bench step, or python packages/mindvl-train/benchmarks/step.py [--quick] [--json]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "mindvl-data" / "benchmarks"))

from figures import Figure, median, print_report
from ways import WAYS

HERE = Path(__file__).parent


def main() -> None:
    """Measure everything and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest size, one round")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--way", nargs=2, metavar=("NAME", "SIZE"), help="one way alone, in this process")
    arguments = parser.parse_args()
    if arguments.way:
        name, size = arguments.way
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(WAYS[name](Path(directory), size, arguments.quick)))
        return
    sizes = ("5M",) if arguments.quick else ("5M", "20M", "100M")
    rounds = 1 if arguments.quick else 3
    figures = [figure for size in sizes for figure in equal_packs(size, rounds, arguments.quick)]
    figures += [figure for size in sizes[:2] for figure in padded_batches(size, rounds, arguments.quick)]
    print_report(figures, as_json=arguments.json, directory=HERE)


def equal_packs(size: str, rounds: int, quick: bool) -> list[Figure]:
    """Full packs of one sample each: against a plain transformers loop, and against our model without our loop."""
    found = measure(("ours", "transformers", "bare"), size, rounds, quick)
    ours, bare = found["ours"], found["bare"]
    note = (
        f"{bare['parameters'] / 1e6:,.1f}M parameters, {ours['tokens_per_step']:,.0f} tokens a step in full packs, fp32"
    )
    return [
        Figure(
            name=f"{size}: training, equal packs",
            value=ours["tokens_per_s"],
            unit="tokens/s",
            rival="transformers, plain loop",
            rival_value=found["transformers"]["tokens_per_s"],
            ratio_at_least=None if quick else 1.0,
            note=note,
        ),
        Figure(
            name=f"{size}: what the loop adds",
            value=100 * (bare["tokens_per_s"] / ours["tokens_per_s"] - 1),
            unit="%",
            at_most=None if quick else 3.0,
            note="over forward, backward, clip and update of the same model, one call each",
        ),
        Figure(
            name=f"{size}: outside the model",
            value=100 * ours["outside"],
            unit="% of the step",
            note="data, host and collectives in the run's own step-time split: the loop without noise between runs",
        ),
        Figure(
            name=f"{size}: data wait",
            value=100 * ours["waiting"],
            unit="% of the step",
            at_most=None if quick else 1.0,
            note="by the clock, from the run's own step-time split",
        ),
    ]


def padded_batches(size: str, rounds: int, quick: bool) -> list[Figure]:
    """The mixture of the packing benchmark: packed sequences against batches of 8 padded to their longest."""
    found = measure(("packed", "padded"), size, rounds, quick)
    return [
        Figure(
            name=f"{size}: training, the workload's lengths",
            value=found["packed"]["tokens_per_s"],
            unit="tokens/s",
            rival="transformers, padded batches of 8",
            rival_value=found["padded"]["tokens_per_s"],
            ratio_at_least=None if quick else 2.5,
            note=f"real tokens; padding is {100 * found['padded']['padding']:.0f} % of the rival's, "
            f"{100 * found['packed']['padding']:.1f} % of ours",
        )
    ]


def measure(names: tuple[str, ...], size: str, rounds: int, quick: bool) -> dict[str, dict[str, float]]:
    """Medians over rounds of what each way says, each time in a fresh process."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names:
            command = [sys.executable, __file__, "--way", name, size, *(["--quick"] if quick else [])]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
            message = f"{size} {name}, round {turn + 1} of {rounds}: {runs[name][-1]['tokens_per_s']:,.0f} tokens/s"
            print(message, file=sys.stderr, flush=True)  # rounds take minutes
    return {name: {key: median(run[key] for run in found) for key in found[0]} for name, found in runs.items()}


if __name__ == "__main__":
    main()
