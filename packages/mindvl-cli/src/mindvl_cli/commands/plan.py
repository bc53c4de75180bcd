# SPDX-License-Identifier: Apache-2.0
"""`mindvl plan`: estimate memory and step time for each parallel layout, and write a recipe with the best one.

A thin layer over mindvl_train.layout_search; pages/plan_text.py formats the result.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from mindvl_cli.commands.options import AS_JSON, OUT_FILE, OVERRIDES, FiniteRange, count_option
from mindvl_cli.failures import CliError
from mindvl_cli.whole_file import write_whole

if TYPE_CHECKING:
    from mindvl_model import MindVLConfig
    from mindvl_train import RunConfig
    from mindvl_train.layout_search import Candidate, Machine, Request
    from mindvl_train.layout_search.blocks import Kernels

_PHASES = ("warmup", "multitask", "sft")
_ABOVE_ZERO = FiniteRange(min=0, min_open=True)


@click.command(epilog="Example: mindvl plan mindvl-8b --device 910b2 --devices 64 --out planned.yaml")
@click.argument("model")
@OVERRIDES
@click.option(
    "--device", "device_name", help="Accelerator model, such as 910b2 or h100; required unless --measure is given."
)
@count_option("--devices", "num_devices", default=8, help="Number of devices.")
@count_option("--per-server", default=8, help="Devices per server.")
@count_option("--seq-length", least=128, help="Sequence length in tokens. [default: that of the recipe, or 8192]")
@click.option(
    "--max-pixels",
    help="Maximum image area in pixels; auto: the largest that fits. [default: that of the recipe, or 1003520]",
)
@count_option(
    "--max-patches",
    least=0,
    help="Maximum patches per packed sequence. [default: that of the recipe, or 1.25 x the mean patches per packed sequence]",
)
@click.option(
    "--visual-share", type=FiniteRange(0, 1), help="Visual tokens as a fraction of all tokens. [default: 0.48]"
)
@count_option("--global-batch-size", help="Packed sequences per optimizer step. [default: that of the recipe, or 1024]")
@click.option(
    "--phase",
    type=click.Choice(_PHASES),
    help="Training phase, which sets the trainable parts. [default: that of the recipe, or multitask]",
)
@count_option(
    "--lora-rank",
    help="Rank of low-rank adapters on all linear layers, with frozen weights. [default: that of the recipe]",
)
@click.option(
    "--base-bits",
    type=click.Choice(["16", "8", "4"]),
    help="Bits of the frozen weights of linear layers below adapters. [default: that of the recipe, or 16]",
)
@click.option(
    "--memory-gb", type=_ABOVE_ZERO, help="Memory per device in GB (10^9 bytes). [default: from the device table]"
)
@click.option(
    "--link-gb-s",
    type=_ABOVE_ZERO,
    help="One-way bandwidth between devices of a server in GB/s (10^9 bytes per second). [default: from the device table]",
)
@click.option(
    "--network-gb-s",
    type=_ABOVE_ZERO,
    help="Bandwidth between servers per device in GB/s (10^9 bytes per second). [default: from the device table]",
)
@click.option(
    "--efficiency",
    type=FiniteRange(0.01, 1),
    help="Matrix multiplication throughput as a share of the peak. [default: 0.58]",
)
@count_option("--top", default=10, help="Number of layouts to show.")
@click.option("--out", type=OUT_FILE, help="New YAML file for the recipe with the best layout.")
@click.option(
    "--measure",
    is_flag=True,
    help="Run two steps in the layout of the recipe on this machine, and compare estimated with measured memory.",
)
@count_option("--nproc", default=1, help="Processes for --measure.")
@AS_JSON
def plan(model: str, overrides: tuple[str, ...], measure: bool, nproc: int, as_json: bool, **options: Any) -> None:
    """Estimate memory and step time of MODEL for each parallel layout.

    MODEL is a named size (such as tiny, mindvl-8b or mindvl-671b-a37b), a model directory, or a recipe; KEY=VALUE overrides
    one value of the recipe, with dots between levels: global_batch_size=512. The estimates are computed, not measured:
    docs/design/layout-search.md compares them with measurements. docs/reference/metrics.md has the device table.
    """
    from mindvl_cli.pages import plan_text

    config = _recipe(model, overrides)
    if measure:
        if config is None:
            raise CliError(f"--measure: {model!r} is not a recipe. Give a recipe, whose layout is run.")
        document = _measure(config, nproc)
        click.echo(json.dumps(document) if as_json else plan_text.measured(document))
        return
    request = _request(model, config, options)
    document = _find(request, model, config, top=options["top"], widest=options["max_pixels"] == "auto")
    written = _write(options["out"], config, request, document) if options["out"] else None
    if as_json:
        click.echo(json.dumps(document))
        return
    click.echo(plan_text.found(document))
    if written:
        click.echo(written)
    if not document["plans"]:
        raise CliError(
            f"--devices: no layout of {model} fits on {options['num_devices']}. Use more devices; the output above shows how "
            "much memory is missing."
        )


def _recipe(model: str, overrides: tuple[str, ...]) -> "RunConfig | None":
    from mindvl_cli.pipeline_file import load_recipe

    if model.endswith((".yaml", ".yml")):
        return load_recipe(Path(model), overrides)
    if overrides:
        raise CliError(
            f"KEY=VALUE: {' '.join(overrides)!r} overrides a recipe, but {model!r} is not one. Name a recipe, or use the "
            "options of mindvl plan --help."
        )
    return None


def _model(name: str) -> "MindVLConfig":
    from mindvl_model import named_config
    from mindvl_model.hf.directory_config import config_from_directory
    from mindvl_model.sizes import NAMED_SIZES

    if name in NAMED_SIZES:
        return named_config(name)
    if Path(name).is_dir():
        _refuse_recipes(Path(name))
        return config_from_directory(Path(name))
    raise CliError(
        f"MODEL: {name!r} is not a named size, a directory or a recipe. Use one of {', '.join(sorted(NAMED_SIZES))}, a "
        "model directory or a recipe."
    )


def _refuse_recipes(directory: Path) -> None:
    """Refuse a directory of recipes, and name the recipes."""
    from mindvl_cli.load import top_keys

    if (directory / "config.json").exists():
        return
    recipes = [str(path) for path in sorted(directory.glob("*.yaml")) if "phase" in top_keys(path)]
    if recipes:
        raise CliError(
            f"{directory}: is not a model directory, it has no config.json. Name one of its recipes: {', '.join(recipes)}."
        )


def _machine(options: dict[str, Any]) -> "Machine":
    from mindvl_train.devices import DEVICES, find_device
    from mindvl_train.layout_search import MATMUL_EFFICIENCY, Machine

    known = ", ".join(device.name.lower() for device in DEVICES)
    name = options["device_name"]
    if name is None:
        raise CliError(f"--device: is required. Use one of {known}.")
    device = find_device(name)
    if device is None:
        raise CliError(f"--device: {name!r} is unknown. Use one of {known}.")
    return Machine(
        device=device,
        num_devices=options["num_devices"],
        per_server=options["per_server"],
        memory_gb=options["memory_gb"],
        link_gb_s=options["link_gb_s"],
        network_gb_s=options["network_gb_s"],
        efficiency=options["efficiency"] or MATMUL_EFFICIENCY,
    )


def _request(model: str, config: "RunConfig | None", options: dict[str, Any]) -> "Request":
    from mindvl_model.adapters import LoRAConfig
    from mindvl_model.adapters.lora_config import quantization_problem
    from mindvl_train.config import TRAINABLE
    from mindvl_train.layout_search import Request, request_of

    named = _model(model) if config is None else None  # before the device: its messages come first
    machine = _machine(options)
    request = (
        Request(model=named, machine=machine) if named is not None else request_of(cast("RunConfig", config), machine)
    )
    pixels = options["max_pixels"]
    if pixels is not None and pixels != "auto" and not pixels.isdecimal():
        raise CliError(f"--max-pixels: {pixels!r} is not a number of pixels. Use for example 1003520 or auto.")
    _check_sizes(config, request.model, options["seq_length"], None if pixels in (None, "auto") else int(pixels))
    given = {name: options[name] for name in ("seq_length", "max_patches", "visual_share", "global_batch_size")}
    given["max_pixels"] = None if pixels in (None, "auto") else int(pixels)
    given["lora"] = LoRAConfig(rank=options["lora_rank"]) if options["lora_rank"] else None
    bits = options["base_bits"]
    if bits is not None:
        lora = given["lora"] or request.lora
        if lora is None:
            raise CliError("--base-bits: there are no adapters, below which weights are frozen. Add --lora-rank.")
        given["lora"] = replace(lora, base_bits=int(bits))
    given["trained"] = TRAINABLE[options["phase"]] if options["phase"] else None
    request = replace(request, **{name: value for name, value in given.items() if value is not None})
    if machine.kernels == "npu" and (problem := quantization_problem(request.lora, "npu")) is not None:
        raise CliError(problem)
    return request


def _check_sizes(config: "RunConfig | None", model: "MindVLConfig", seq_length: int | None, pixels: int | None) -> None:
    """Refuse sequence lengths and image sizes that a data section would refuse."""
    from mindvl_data import PackingConfig

    multiple = (PackingConfig if config is None else config.data.packing).pad_multiple
    if seq_length is not None and seq_length % multiple:
        raise CliError(
            f"--seq-length: {seq_length} is not a multiple of {multiple}, to which sequences are padded. Use "
            f"{max(1, seq_length // multiple) * multiple}."
        )
    least = (model.vision.patch_size * model.vision.spatial_merge_size) ** 2
    least = least if config is None else max(least, config.data.image.min_pixels)
    if pixels is not None and pixels < least:
        raise CliError(f"--max-pixels: {pixels} is less than the smallest image size. Use {least} or more.")


def _find(request: "Request", model: str, config: "RunConfig | None", *, top: int, widest: bool) -> dict[str, Any]:
    """The whole result as one document."""
    from mindvl_train.layout_search import BUDGETS, days, largest_pixels, room, search
    from mindvl_train.preprocessing import preprocessing_of

    task = request.task()
    found = search(task, keep=top)
    best = found.candidates[0] if found.candidates else None
    name = config.model.size if config is not None and config.model.size else model
    return {
        "model": name,
        "device": request.machine.device.name,
        "devices": request.machine.num_devices,
        "seq_length": request.seq_length,
        "max_pixels": request.max_pixels,
        "token_pixels": preprocessing_of(request.model.vision).token_pixels,
        "visual_limit": request.visual_limit,
        "global_batch_size": request.global_batch_size,
        "trained": list(request.trained),
        "adapter": None if request.lora is None else vars(request.lora) | {"parameters": _adapter_parameters(request)},
        "limit": task.limit,
        "tokens_per_step": request.global_batch_size * request.seq_length,
        "fitting": found.num_fitting,
        "too_large": found.num_full,
        "refused": dict(found.refused.most_common()),
        "plans": [_described(request, one) for one in found.candidates],
        "misses": [_described(request, one) for one in found.misses[:3]],
        "largest_max_pixels": largest_pixels(request, best) if best is not None and widest else None,
        "room": [vars(one) for one in room(request, best)] if best is not None else [],
        "days": [vars(one) for one in days(request, best, BUDGETS[name])]
        if best is not None and name in BUDGETS and request.lora is None
        else [],
    }


def _adapter_parameters(request: "Request") -> int:
    from mindvl_model.adapters.sizes import adapter_parameters

    assert request.lora is not None
    return sum(adapter_parameters(request.model, request.lora, request.trained).values())


def _described(request: "Request", plan: "Candidate") -> dict[str, Any]:
    from mindvl_cli.load import to_plain

    return {
        "parallel": to_plain(plan.parallel),
        "recompute": to_plain(plan.recompute),
        "offload": plan.offload,
        "dp_size": plan.dp_size,
        "microbatches": plan.num_microbatches,
        "fullest": plan.fullest,
        "memory": [memory.as_dict() for memory in plan.memory],
        "time": plan.time.as_dict(),
        "mfu": plan.mfu,
        "tokens_per_s_device": request.global_batch_size
        * request.seq_length
        / (plan.time.total * request.machine.num_devices),
        "bubble": plan.bubble,
    }


def _write(out: Path, config: "RunConfig | None", request: "Request", document: dict[str, Any]) -> str:
    """Write the recipe with the best layout, or only its sections without a recipe; returns a line for the user."""
    from mindvl_cli.load import to_plain, to_yaml
    from mindvl_model.parallel_config import ParallelConfig, RecomputeConfig

    if not document["plans"]:
        return ""
    best = document["plans"][0]
    parallel = best["parallel"] | {
        "stage_layers": best["parallel"]["stage_layers"] and tuple(best["parallel"]["stage_layers"])
    }
    if config is None:
        sections = {
            "global_batch_size": request.global_batch_size,
            "precision": "bf16",
            **({} if request.lora is None else {"adapter": to_plain(request.lora)}),
            "parallel": best["parallel"],
            "recompute": best["recompute"],
            "optimizer": {"offload": best["offload"]},
        }
        write_whole(out, to_yaml(sections))
        return f"sections for a recipe: {out}"
    image = config.data.image
    pixels = document["largest_max_pixels"] or request.max_pixels
    packing = replace(config.data.packing, seq_length=request.seq_length, max_patches=request.max_patches)
    fitted = replace(
        config,
        global_batch_size=request.global_batch_size,
        parallel=ParallelConfig(**parallel),
        recompute=RecomputeConfig(**best["recompute"]),
        optimizer=replace(config.optimizer, offload=best["offload"]),
        adapter=request.lora,
        data=replace(config.data, packing=packing, image=replace(image, max_pixels=pixels)),
    )
    write_whole(out, to_yaml(fitted))
    return f"recipe: {out}. Next: mindvl train {out} --dry-run"


def _measure(config: "RunConfig", nproc: int) -> dict[str, Any]:
    """Estimated and measured bytes of every rank."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: its profiler logs errors without a GPU
    from mindvl_model import set_up_device
    from mindvl_train.layout_search.measure import job_of, measure, predict

    kind = set_up_device().device(0).type
    job = job_of(config, nproc)
    microbatches = min(job.run.num_microbatches, 4 * config.parallel.pp_size)  # more do not change the memory
    job = replace(job, run=replace(job.run, num_microbatches=microbatches))
    measured = measure(job)
    predicted = predict(job, cast("Kernels", kind))
    return {
        "device": kind,
        "microbatches": microbatches,
        "ranks": [
            {"predicted": memory.as_dict(), "measured": vars(seen) | {"total": seen.total}}
            for memory, seen in zip(predicted, measured, strict=True)
        ],
    }
