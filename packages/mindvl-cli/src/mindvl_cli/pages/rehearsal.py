# SPDX-License-Identifier: Apache-2.0
"""The page of `mindvl rehearse`: memory over the step, messages, operators, host waits and time of each rehearsed rank.

Comes after mindvl_train.rehearsal.summary, whose document it shows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindvl_cli.pages.plots import MAX_POINTS, Plot, areas
from mindvl_cli.pages.render import render
from mindvl_cli.units import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from mindvl_train.rehearsal.record import MemoryPoint, RankRecord

MOST_OPERATORS = 15  # in the table of a rank; the others are one line
_TIME_NAMES = {"compute": "operators with FLOPs", "other_operators": "other operators", "messages": "messages"}


def rehearsal_page(document: dict[str, Any], records: "Sequence[RankRecord]") -> str:
    """The page as HTML.

    Args:
        document: Result of summarize.
        records: The records of the same ranks, for the memory over the step.
    """
    by_rank = {record.rank: record for record in records}
    return render(
        "rehearsal",
        d=document,
        sentence=document["sentence"],
        memory=bytes_text(document["memory"]["peak_bytes"] + document["memory"]["base_bytes"]),
        usable=bytes_text(document["memory"]["usable_bytes"]),
        margin=bytes_text(abs(document["memory"]["margin_bytes"])),
        step_s=None if document["step_time"] is None else seconds_text(document["step_time"]["total"]),
        class_rows=[
            (one["content"], f"{one['num_ranks']:,}", ", ".join(map(str, one["rehearsed"])) or "none")
            for one in document["classes"]
        ],
        rank_rows=[_rank_row(figures) for figures in document["ranks"]],
        time_head=["part", *(f"rank {figures['rank']}, counted" for figures in document["ranks"]), "model"],
        time_rows=_time_rows(document),
        ranks=[_rank(figures, by_rank[figures["rank"]], document["memory"]) for figures in document["ranks"]],
    )


def _rank_row(figures: dict[str, Any]) -> tuple[str, ...]:
    estimated = figures["estimated_bytes"]
    return (
        str(figures["rank"]),
        bytes_text(figures["peak_bytes"]),
        f"{bytes_text(estimated)} ({100 * (estimated / figures['peak_bytes'] - 1):+.1f} %)",
        f"{figures['num_operators']:,}",
        f"{figures['flops'] / 1e12:,.1f} T",
        bytes_text(figures["bytes_moved"]),
        f"{sum(row['count'] for row in figures['messages']):,}",
        f"{sum(wait['count'] for wait in figures['waits']):,}",
        seconds_text(figures["wall_s"]),
    )


def _time_rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Counted seconds of each rank by category, and the machine model for the slowest pipeline rank."""
    model = document["step_time"]
    if model is None:
        return []
    modelled = {
        "compute": model["matmul"] + model["attention"] + model["recompute"],
        "other_operators": model["elementwise"] + model["optimizer"],
        "messages": sum(model[name] for name in ("tp", "cp", "ep", "pp", "dp")),
    }
    rows = [
        (
            name,
            *(seconds_text(figures["counted_time"][key]) for figures in document["ranks"]),
            seconds_text(modelled[key]),
        )
        for key, name in _TIME_NAMES.items()
    ]
    rows.append(("pipeline bubble", *("-" for _ in document["ranks"]), seconds_text(model["bubble"])))
    totals = [sum(figures["counted_time"].values()) for figures in document["ranks"]]
    rows.append(("sum", *map(seconds_text, totals), seconds_text(model["total"])))
    return rows


def _rank(figures: dict[str, Any], record: "RankRecord", memory: dict[str, float]) -> dict[str, Any]:
    peak = figures["peak"]
    largest, others = figures["operators"][:MOST_OPERATORS], figures["operators"][MOST_OPERATORS:]
    operators = [_operator_row(each) for each in largest]
    if others:
        total = {key: sum(one[key] for one in others) for key in ("count", "flops", "bytes_read", "bytes_written")}
        operators.append(_operator_row({"name": f"{len(others)} others"} | total))
    return {
        "rank": figures["rank"],
        "content": figures["content"],
        "plot": memory_plot(record, memory["usable_bytes"] - memory["base_bytes"]),
        "peak_rows": [
            (
                name,
                bytes_text(size),
                f"{size / max(1, peak['num_bytes']):.1%}",
                bytes_text(record.persistent.get(name, 0)),
            )
            for name, size in sorted(peak["categories"].items(), key=lambda item: -item[1])
        ],
        "peak": bytes_text(peak["num_bytes"]),
        "peak_at": f"{peak['operator_name']} at {peak['source']}",
        "message_rows": [
            (row["group"], row["kind"], row["backend"], f"{row['count']:,}", bytes_text(row["num_bytes"]))
            for row in figures["messages"]
        ],
        "operator_rows": operators,
        "wait_rows": [
            (
                wait["source"],
                wait["caller"],
                wait["kind"],
                wait["operator"],
                f"{wait['count']:,}",
                bytes_text(wait["num_bytes"]),
            )
            for wait in figures["waits"]
        ],
        "missing_rows": [(name, one["source"], f"{one['count']:,}") for name, one in figures["missing"].items()],
    }


def _operator_row(count: dict[str, Any]) -> tuple[str, ...]:
    return (
        count["name"],
        f"{count['count']:,}",
        count_text(count["flops"] / 1e9) if count["flops"] else "-",
        bytes_text(count["bytes_read"]),
        bytes_text(count["bytes_written"]),
    )


def memory_plot(record: "RankRecord", limit: float) -> Plot | None:
    """Live device memory over the last step by category, in GB over operators; dashed: the memory for tensors."""
    last = [phase for phase in record.phases if phase.step == record.num_steps - 1]
    if not last:
        return None
    begin = last[0].first_operator
    points = _highest([point for point in record.timeline if point.operator >= begin])
    if not points:
        return None
    names = record.categories or ("all",)
    held = [point.held or (point.num_bytes,) for point in points]
    order = sorted(range(len(names)), key=lambda place: -min(values[place] for values in held))
    layers = [
        (names[place], [values[place] / 1e9 for values in held]) for place in order if any(v[place] for v in held)
    ]
    return areas(
        [float(point.operator - begin) for point in points],
        layers,
        x_label="device operators of the step",
        describe=f"Device memory of rank {record.rank} in GB",
        limit=limit / 1e9,
    )


def _highest(points: "Sequence[MemoryPoint]") -> "list[MemoryPoint]":
    """At most MAX_POINTS points: the highest one of each interval, so that the peak stays."""
    every = -(-len(points) // MAX_POINTS) or 1
    return [max(points[at : at + every], key=lambda point: point.num_bytes) for at in range(0, len(points), every)]
