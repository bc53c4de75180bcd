# SPDX-License-Identifier: Apache-2.0
"""Training steps beside transformers: traffic of a layer, equal packs, padded batches, and what our loop adds to bare PyTorch.

First the operators of one layer are counted at full size (layers.py). Every later figure runs in processes of its own, ours
and the rival in turn, medians over rounds. Time is processor time of the training thread on a CPU, where forward, backward and
update all run; images are decoded by other threads for ours, and before the clock for the rivals.
Run: mindvl bench step, or python packages/mindvl-train/benchmarks/step.py [--quick | --full] [--json]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "mindvl-data" / "benchmarks"))

from figures import Figure, median, print_report

HERE = Path(__file__).parent


class Scope(NamedTuple):
    """How much is measured."""

    rounds: int
    steps: dict[str, int]  # size -> measured steps on full packs
    workload_rounds: int
    workload_steps: dict[str, int]  # size -> measured steps on the mixed workload
    has_targets: bool = True


QUICK = Scope(1, {"5M": 5}, 1, {"5M": 2}, has_targets=False)
DEFAULT = Scope(3, {"5M": 6}, 1, {"5M": 2})  # ten minutes on two cores
FULL = Scope(3, {"5M": 12, "20M": 7, "100M": 7}, 3, {"5M": 4, "20M": 2})  # hours


def main() -> None:
    """Measure everything and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of fewer steps, without targets")
    parser.add_argument("--full", action="store_true", help="more sizes and more steps; takes hours")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--way", nargs=3, metavar=("NAME", "SIZE", "STEPS"), help="one way alone, in this process")
    arguments = parser.parse_args()
    if arguments.way:
        from ways import WAYS

        name, size, steps = arguments.way
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(WAYS[name](Path(directory), size, int(steps))))
        return
    from layers import layer_figures

    scope = QUICK if arguments.quick else FULL if arguments.full else DEFAULT
    figures = layer_figures()
    figures += [figure for size in scope.steps for figure in equal_packs(size, scope)]
    figures += [figure for size in scope.workload_steps for figure in padded_batches(size, scope)]
    print_report(figures, as_json=arguments.json, directory=HERE)


def equal_packs(size: str, scope: Scope) -> list[Figure]:
    """Full packs of one sample each: against a plain transformers loop, and against our model without our loop."""
    found = measure(("ours", "transformers", "bare"), size, scope.steps[size], scope.rounds)
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
            ratio_at_least=1.0 if scope.has_targets else None,
            note=note,
        ),
        Figure(
            name=f"{size}: what the loop adds",
            value=100 * (bare["tokens_per_s"] / ours["tokens_per_s"] - 1),
            unit="%",
            at_most=3.0 if scope.has_targets else None,
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
            at_most=1.0 if scope.has_targets else None,
            note="by the clock, from the run's own step-time split",
        ),
    ]


def padded_batches(size: str, scope: Scope) -> list[Figure]:
    """The mixture of the packing benchmark: packed sequences against batches of 8 padded to their longest."""
    found = measure(("packed", "padded"), size, scope.workload_steps[size], scope.workload_rounds)
    return [
        Figure(
            name=f"{size}: training, the workload's lengths",
            value=found["packed"]["tokens_per_s"],
            unit="tokens/s",
            rival="transformers, padded batches of 8",
            rival_value=found["padded"]["tokens_per_s"],
            ratio_at_least=2.5 if scope.has_targets else None,
            note=f"real tokens; padding is {100 * found['padded']['padding']:.0f} % of the rival's, "
            f"{100 * found['packed']['padding']:.1f} % of ours",
        )
    ]


def measure(names: tuple[str, ...], size: str, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians over rounds of what each way says, each time in a fresh process."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names:
            command = [sys.executable, __file__, "--way", name, size, str(steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
            message = f"{size} {name}, round {turn + 1} of {rounds}: {runs[name][-1]['tokens_per_s']:,.0f} tokens/s"
            print(message, file=sys.stderr, flush=True)  # rounds take minutes
    return {name: {key: median(run[key] for run in found) for key in found[0]} for name, found in runs.items()}


if __name__ == "__main__":
    main()
