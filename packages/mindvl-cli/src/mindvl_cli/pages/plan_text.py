# SPDX-License-Identifier: Apache-2.0
"""What `mindvl plan` prints: the best layouts, memory by stage as bars, what fails and why, what else would fit.

Comes after the command has made its document; text alone, so that it reads the same in a log.
"""

from typing import Any

from mindvl_cli.units import bytes_text, seconds_text

_PARTS = ("parameters", "gradients", "optimizer", "inputs", "activations", "temporary", "base")
_MARKS = dict(zip(_PARTS, "pgoiat.", strict=True))
_BAR = 60  # characters of the device's memory


def found(document: dict[str, Any]) -> str:
    """Everything a plan says."""
    sections = [_head(document)]
    if document["plans"]:
        best = document["plans"][0]
        sections += [_table(document["plans"]), _time(best), _memory(best, document["limit"])]
    sections += [_failures(document), _room(document), _days(document)]
    return "\n\n".join(section for section in sections if section)


def measured(document: dict[str, Any]) -> str:
    """Predicted beside measured bytes, by rank and part."""
    lines = [f"two steps of {document['microbatches']} packs on {document['device']}; MB predicted / measured"]
    for rank, one in enumerate(document["ranks"]):
        predicted, seen = one["predicted"], one["measured"]
        made = predicted | {"activations": predicted["activations"] + predicted["temporary"]}
        cells = [
            f"{name} {made[name] / 1e6:,.1f} / {seen[name] / 1e6:,.1f}"
            for name in ("parameters", "gradients", "optimizer", "inputs", "activations", "total")
        ]
        off = 100 * (made["total"] / seen["total"] - 1)
        lines.append(f"rank {rank}: {', '.join(cells)} ({off:+.1f} %)")
    return "\n".join(lines)


def layout_name(plan: dict[str, Any]) -> str:
    """Such as "tp2 pp4x2 ep8 dp16"; sizes of 1 are left out."""
    parallel = plan["parallel"]
    words = []
    for short in ("tp", "cp", "pp", "ep"):
        size = parallel[f"{short}_size"]
        if size > 1:
            virtual = parallel["virtual_stages"]
            words.append(f"{short}{size}" + (f"x{virtual}" if short == "pp" and virtual > 1 else ""))
    words.append(f"dp{plan['dp_size']}")
    return " ".join(words + (["spread"] if parallel["spread_images"] else []))


def again(plan: dict[str, Any]) -> str:
    """What is recomputed, and whether activations or moments are in host memory."""
    recompute = plan["recompute"]
    layers = f" {recompute['layers']}" if recompute["layers"] is not None else ""
    away = f", offload {recompute['offload_layers']} layers" if recompute["offload_layers"] else ""
    return f"{recompute['kind']}{layers}{away}" + (", offload" if plan["offload"] else "")


def _head(document: dict[str, Any]) -> str:
    trained = ", ".join(document["trained"])
    if document["adapter"] is not None:
        adapter = document["adapter"]
        trained = f"adapters of rank {adapter['rank']} ({adapter['parameters'] / 1e6:,.1f}M parameters) of {trained}"
        if adapter["base_bits"] < 16:
            trained += f", frozen weights in {adapter['base_bits']} bits"
    return (
        f"{document['model']} on {document['devices']} x {document['device']}: {document['global_batch_size']:,} packs of "
        f"{document['seq_length']:,} tokens a step, at most {document['visual_limit']:,} visual tokens in a pack; trained: "
        f"{trained}\nlayouts that fit into {bytes_text(document['limit'])}: {document['fitting']:,}; that need more: "
        f"{document['too_large']:,}. Times are estimates of a machine model, not measurements (docs/design/layout-search.md)."
    )


def _table(plans: list[dict[str, Any]]) -> str:
    head = ("layout", "recompute", "packs", "memory", "step", "MFU", "bubble", "tokens/s/device")
    packs = [head]
    for plan in plans:
        fullest = plan["memory"][plan["fullest"]]
        packs.append(
            (
                layout_name(plan),
                again(plan),
                str(plan["microbatches"]),
                bytes_text(fullest["total"]),
                seconds_text(plan["time"]["total"]),
                f"{100 * plan['mfu']:.1f} %",
                f"{100 * plan['bubble']:.1f} %",
                f"{plan['tokens_per_s_device']:,.0f}",
            )
        )
    widths = [max(len(pack[column]) for pack in packs) for column in range(len(head))]
    lines = []
    for pack in packs:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(pack, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _time(plan: dict[str, Any]) -> str:
    parts = sorted(((s, name) for name, s in plan["time"].items() if name != "total" and s > 0), reverse=True)
    return "step of the first: " + ", ".join(f"{name} {seconds_text(seconds)}" for seconds, name in parts)


def _memory(plan: dict[str, Any], limit: float) -> str:
    layers = plan["parallel"]["stage_layers"]
    size = plan["parallel"]["pp_size"]
    lines = [f"memory of the first by pipeline rank, of {bytes_text(limit)}:"]
    shown = range(size) if size <= 10 else [*range(5), *range(size - 3, size)]
    for rank in shown:
        memory = plan["memory"][rank]
        own = "" if layers is None else f" layers {'+'.join(str(count) for count in layers[rank::size])}"
        lines.append(f"  {rank:3d} |{_bar(memory, limit)}| {bytes_text(memory['total']):>8}{own}")
        if size > 10 and rank == 4:
            lines.append("   ...")
    lines.append("  " + ", ".join(f"{mark} {name}" for name, mark in _MARKS.items()))
    fullest = plan["memory"][plan["fullest"]]
    kept = sorted(fullest["activations_by"].items(), key=lambda item: -item[1])
    lines += [
        f"  rank {plan['fullest']}: {_sizes(fullest)}",
        "  of its activations: " + ", ".join(f"{kind} {bytes_text(size)}" for kind, size in kept),
    ]
    if host := max(memory["host"] for memory in plan["memory"]):
        lines.append(f"  offloaded activations need up to {bytes_text(host)} of host memory for each device")
    return "\n".join(lines)


def _bar(memory: dict[str, float], limit: float) -> str:
    bar, held = "", 0.0
    for name in _PARTS:
        held += memory[name]
        bar = bar.ljust(round(_BAR * held / limit), _MARKS[name])
    return bar[:_BAR].ljust(_BAR)


def _sizes(memory: dict[str, float]) -> str:
    return ", ".join(f"{name} {bytes_text(memory[name])}" for name in _PARTS if memory[name])


def _failures(document: dict[str, Any]) -> str:
    lines = []
    if document["misses"]:
        lines.append("layouts closest to fitting, with all layers recomputed, or activations and moments on the host:")
    for plan in document["misses"]:
        memory = plan["memory"][plan["fullest"]]
        need, limit = bytes_text(memory["total"]), bytes_text(document["limit"])
        lines.append(f"  {layout_name(plan)}: needs {need} of {limit}: {_sizes(memory)}")
    if document["refused"]:
        lines.append("layouts that are not possible:")
    lines += [f"  {count} x {reason}" for reason, count in document["refused"].items()]
    return "\n".join(lines)


def _room(document: dict[str, Any]) -> str:
    if not document["room"]:
        return ""
    lines = [
        "what fits into the first layout (data.packing.seq_length: most visual tokens of a pack, as max_pixels of one image):"
    ]
    for one in document["room"]:
        visual = one["visual_tokens"]
        fits = (
            "does not fit"
            if visual is None
            else f"{visual:,} visual tokens ({visual * document['token_pixels']:,} pixels)"
        )
        lines.append(f"  {one['seq_length']:6,}: {fits}")
    if document["largest_max_pixels"] is not None:
        lines.append(f"  --max-pixels auto: {document['largest_max_pixels']}")
    return "\n".join(lines)


def _days(document: dict[str, Any]) -> str:
    if not document["days"]:
        return ""
    lines = ["the paper's token budgets in the first layout, packs of one length:"]
    for one in document["days"]:
        note = "" if one["fits"] else "; does not fit, plan it with --phase"
        lines.append(
            f"  {one['phase']:9s} {one['tokens'] / 1e9:4.0f}B tokens: {one['days']:.1f} days "
            f"({seconds_text(one['step_s'])} a step){note}"
        )
    return "\n".join(lines)
