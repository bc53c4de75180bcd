# SPDX-License-Identifier: Apache-2.0
"""The figures of a rehearsal as one document: what the page shows and `--json` prints.

Comes after verdict.py. Times are those of the machine model of the layout search, and the same model applied to what the
rehearsal counted; neither was compared with a device.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from mindvl_train.layout_search import evaluate, request_of
from mindvl_train.layout_search.measure import Job, predict
from mindvl_train.layout_search.step_time import ATTENTION_OF_MATMUL, Machine
from mindvl_train.rehearsal.classes import RankClass, Selection, class_of
from mindvl_train.rehearsal.matching import group_text
from mindvl_train.rehearsal.record import POINT_TO_POINT, Message, RankRecord
from mindvl_train.rehearsal.verdict import Verdict, peak_bytes

# Bytes that a rank sends in one collective of n ranks, for each byte that it gives.
_SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


def summarize(
    records: Sequence[RankRecord],
    job: Job,
    classes: Sequence[RankClass],
    selection: Selection,
    verdict: Verdict,
    machine: Machine | None,
) -> dict[str, Any]:
    """All figures as JSON values; bytes, seconds and counts are of one step on one rank.

    Args:
        records: Rehearsed ranks, ascending.
        job: Run and pack of all ranks.
        machine: Devices of the job; None on CPUs, for which there is no machine model.
    """
    first = records[0]
    estimated = predict(job, first.device_kind)
    return {
        "ok": verdict.is_ok,
        "fits": verdict.fits,
        "sentence": verdict.sentence,
        "reasons": list(verdict.reasons),
        "recipe": first.recipe,
        "recipe_digest": first.recipe_digest,
        "versions": first.versions,
        "device": first.device,
        "devices": first.world_size,
        "kernels": first.kernels,
        "memory": {
            "usable_bytes": verdict.usable_bytes,
            "base_bytes": verdict.base_bytes,
            "tightest_rank": verdict.tightest,
            "peak_bytes": verdict.peak_bytes,
            "margin_bytes": verdict.margin_bytes,
        },
        "ranks_rule": selection.rule,
        "classes": [
            {
                "content": each.content,
                "num_ranks": len(each.ranks),
                "first_rank": each.representative,
                "rehearsed": [rank for rank in selection.ranks if rank in each.ranks],
            }
            for each in classes
        ],
        "unequal": list(verdict.unequal),
        "num_messages": verdict.num_messages,
        "steps": first.num_steps,
        "microbatches": first.num_microbatches,
        "pack": first.pack,
        "ranks": [
            rank_figures(record, machine)
            | {
                "content": class_of(classes, record.rank).content,
                "estimated_bytes": estimated[record.rank].total,
            }
            for record in records
        ],
        "step_time": None if machine is None else _modelled(job, machine),
        "assumptions": list(dict.fromkeys(text for record in records for text in record.assumptions)),
        "not_covered": list(dict.fromkeys(text for record in records for text in record.not_covered)),
    }


def rank_figures(record: RankRecord, machine: Machine | None) -> dict[str, Any]:
    """Figures of one rank, of its last step."""
    last = record.num_steps - 1
    messages = [message for message in record.messages if message.step == last]
    operators = sorted(record.operators.items(), key=lambda item: (-item[1].flops, -item[1].bytes_written, item[0]))
    return {
        "rank": record.rank,
        "coordinates": record.coordinates,
        "peak_bytes": peak_bytes(record),
        "peak": asdict(record.peak),
        "persistent": record.persistent,
        "num_operators": sum(count.count for _, count in operators),
        "flops": sum(count.flops for _, count in operators),
        "bytes_moved": sum(count.bytes_read + count.bytes_written for _, count in operators),
        "operators": [{"name": name} | asdict(count) for name, count in operators],
        "messages": message_table(record, messages),
        "waits": [asdict(wait) for wait in sorted(record.waits, key=lambda wait: -wait.count)],
        "missing": {name: asdict(one) for name, one in record.missing.items()},
        "checkpoint": None if record.checkpoint is None else asdict(record.checkpoint),
        "counted_time": None if machine is None else counted_time(record, messages, machine),
        "wall_s": record.wall_s,
        "host_peak_bytes": record.host_peak_bytes,
    }


def message_table(record: RankRecord, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Count and bytes of the messages by group and kind, those with most bytes first."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for message in messages:
        counts[message.group, message.kind] += 1
        sizes[message.group, message.kind] += message.num_bytes
    return [
        {
            "group": group_text(record.groups[group]),
            "num_ranks": len(record.groups[group].ranks),
            "backend": record.groups[group].backend,
            "kind": kind,
            "count": count,
            "num_bytes": sizes[group, kind],
        }
        for (group, kind), count in sorted(counts.items(), key=lambda item: (-sizes[item[0]], item[0]))
    ]


def counted_time(record: RankRecord, messages: Sequence[Message], machine: Machine) -> dict[str, float]:
    """Seconds of what was counted at the rates of the machine model, if nothing overlaps; without the pipeline bubble.

    Returns:
        Seconds of operators with FLOPs, of other operators (by bytes read and written), and of messages.
    """
    rate = machine.peak * machine.efficiency
    compute = moved = 0.0
    for name, count in record.operators.items():
        if count.flops:
            compute += count.flops / (rate * (ATTENTION_OF_MATMUL if "attention" in name or "attn" in name else 1))
        else:
            moved += (count.bytes_read + count.bytes_written) / machine.memory_bandwidth
    return {
        "compute": compute,
        "other_operators": moved,
        "messages": sum(_sending_s(record, message, machine) for message in messages if not message.on_host),
    }


def _sending_s(record: RankRecord, message: Message, machine: Machine) -> float:
    ranks = record.groups[message.group].ranks
    if message.kind in POINT_TO_POINT:
        assert message.peer is not None
        return machine.sending_s(message.num_bytes, 2, max(1, abs(message.peer - record.rank)))
    factor = _SENT.get(message.kind, lambda n: 1.0)(len(ranks))
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return machine.sending_s(message.num_bytes * factor, len(ranks), stride)


def _modelled(job: Job, machine: Machine) -> dict[str, float]:
    """Step time of the machine model for the same packs, in seconds by category."""
    run = job.run
    task = request_of(run.config, machine).task()
    parallel = run.parallel
    if parallel.pp_size > 1:
        parallel = replace(parallel, stage_layers=run.chunk_layers)
    same = replace(task, full_pack=job.pack, usual_pack=job.pack, expert_imbalance=1.0)
    candidate = evaluate(same, parallel, run.config.recompute, offload=run.config.optimizer.offload)
    return candidate.time.as_dict()
