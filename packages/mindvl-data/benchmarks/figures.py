# SPDX-License-Identifier: Apache-2.0
"""One measured figure, the comparison measured in the same run, and its target; printed as JSON or as a table.

Used by every benchmark in this directory; `mindvl bench` reads the JSON.
"""

import json
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of a report."""

    name: str
    value: float
    unit: str
    rival: str = ""  # the implementation compared with in the same run
    rival_value: float | None = None
    at_least: float | None = None  # bounds of the value
    at_most: float | None = None
    ratio_at_least: float | None = None  # bound of value / rival_value
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.value / self.rival_value if self.rival_value else None

    @property
    def holds(self) -> bool | None:
        """Whether all targets are met; None if there is none, or the implementation to compare with is not installed."""
        found = [
            self.at_least is None or self.value >= self.at_least,
            self.at_most is None or self.value <= self.at_most,
            self.ratio_at_least is None or self.ratio is None or self.ratio >= self.ratio_at_least,
        ]
        if self.at_least is None and self.at_most is None and (self.ratio_at_least is None or self.ratio is None):
            return None
        return all(found)

    @property
    def target(self) -> str:
        bounds = (
            (self.at_least, ">= {:g}"), (self.at_most, "<= {:g}"), (self.ratio_at_least, ">= {:g} x rival"),
        )  # fmt: skip
        return ", ".join(text.format(bound) for bound, text in bounds if bound is not None)


def as_rows(figures: Iterable[Figure]) -> list[dict[str, object]]:
    """JSON values, including the derived ones."""
    return [asdict(f) | {"ratio": f.ratio, "target": f.target, "holds": f.holds} for f in figures]


def print_report(figures: Sequence[Figure], *, as_json: bool, directory: Path = Path(__file__).parent) -> None:
    """Print all figures with the commit and the versions of the packages.

    `directory` is the directory of the benchmark, inside the measured package.
    """
    if as_json:
        names = ("mindvl-data", "mindvl-ops", "simplejpeg", "pillow", "numpy", "torch", "torchvision", "transformers",
                 "webdataset", "megatron-energon")  # fmt: skip
        found = {name: version for name in names if (version := installed(name))}
        document = {"commit": commit(directory), "versions": found, "figures": as_rows(figures)}
        print(json.dumps(document, indent=1))
        return
    for figure in figures:
        beside = f"{figure.ratio:8.2f} x {figure.rival}" if figure.ratio is not None else f"  {figure.rival}"
        state = {True: "holds", False: "MISSED", None: ""}[figure.holds]
        print(
            f"{figure.name:<46} {figure.value:>12,.5g} {figure.unit:<14} {figure.target:<18} {state:<7} {beside} "
            f"{figure.note}".rstrip()
        )


def installed(distribution: str) -> str | None:
    """Version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def commit(here: Path) -> str:
    """The commit of the checkout, with a plus if files of the package differ from it; empty outside of a git checkout."""
    try:
        name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", ".."], cwd=here)
    except OSError:
        return ""
    return name.stdout.strip() + ("+" if changed.returncode else "")


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, relative to the median."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return (high - low) / 2 / middle
