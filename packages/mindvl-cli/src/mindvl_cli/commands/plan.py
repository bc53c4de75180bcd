# SPDX-License-Identifier: Apache-2.0
"""`mindvl plan`: which layouts of a model fit a cluster, how long they take, and a recipe with the best one.

Thin: mindvl_train.layout_search does the work, plan_text.py in pages shows it.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from mindvl_cli.commands.options import OUT_FILE
from mindvl_cli.failures import CliError
from mindvl_cli.whole_file import write_whole

if TYPE_CHECKING:
    from mindvl_model import MindVLConfig
    from mindvl_train import RunConfig
    from mindvl_train.layout_search import Machine, Plan, Request
    from mindvl_train.layout_search.blocks import Kernels

_STEPS = ("warmup", "multitask", "sft")
_ABOVE_ZERO = click.FloatRange(min=0, min_open=True)


@click.command(epilog="Example: mindvl plan mindvl-8b --device 910b2 --devices 64 --out planned.yaml")
@click.argument("model")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--device", "device_name", help="Such as 910b2 or h100; an unknown one lists the known.")
@click.option("--devices", "num_devices", type=click.IntRange(min=1), default=8, show_default=True, help="In all.")
@click.option("--per-server", type=click.IntRange(min=1), default=8, show_default=True, help="Devices of one server.")
@click.option("--seq-length", type=click.IntRange(min=128), help="Tokens of a pack. [default: the recipe's, or 8192]")
@click.option("--max-pixels", help="Of one image, or `auto`: the most that fits. [default: the recipe's, or 1003520]")
@click.option(
    "--max-patches", type=click.IntRange(min=0), help="Of a pack. [default: the recipe's, or 1.25 x the mean]"
)
@click.option("--visual-share", type=click.FloatRange(0, 1), help="Visual tokens among all. [default: 0.48]")
@click.option("--packs-per-step", type=click.IntRange(min=1), help="Packs of a step. [default: the recipe's, or 1024]")
@click.option("--phase", type=click.Choice(_STEPS), help="What is trained. [default: the recipe's, or multitask]")
@click.option("--memory-gb", type=_ABOVE_ZERO, help="Of a device, in place of the table's.")
@click.option("--link-gb-s", type=_ABOVE_ZERO, help="Between devices of a server, one way, in place of the table's.")
@click.option("--network-gb-s", type=_ABOVE_ZERO, help="Between servers, per device, in place of the table's.")
@click.option("--efficiency", type=click.FloatRange(0.01, 1), help="Of large matrices, of the peak. [default: 0.58]")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Layouts shown.")
@click.option("--out", type=OUT_FILE, help="Write the recipe with the best layout.")
@click.option("--measure", is_flag=True, help="Run two steps of the recipe's own layout here; compare their memory.")
@click.option("--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="With --measure: processes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def plan(model: str, overrides: tuple[str, ...], measure: bool, nproc: int, as_json: bool, **options: Any) -> None:
    """Find layouts of MODEL that fit, before a device is booked.

    MODEL is a named size, a model directory, or a recipe, of which KEY=VALUE changes one value. Figures come from
    formulas, not from runs: docs/design/layout-search.md says what they were checked against.
    """
    from mindvl_cli.pages import plan_text

    config = _recipe(model, overrides)
    if measure:
        if config is None:
            raise CliError(f"{model!r} is no recipe. mindvl plan --measure. Give a recipe, whose layout is run.")
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
        raise CliError(f"no layout of {model} fits. --devices {options['num_devices']}. Use more devices, see above.")


def _recipe(model: str, overrides: tuple[str, ...]) -> "RunConfig | None":
    from mindvl_cli.pipeline_file import load_recipe

    if model.endswith((".yaml", ".yml")):
        return load_recipe(Path(model), overrides)
    if overrides:
        raise CliError(
            f"{' '.join(overrides)!r} changes a recipe, but {model!r} is none. mindvl plan. Name a recipe, or use the "
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
        f"no model is called {name!r}, and it is no directory and no recipe. mindvl plan. Use one of "
        f"{', '.join(sorted(NAMED_SIZES))}, a model directory or a recipe."
    )


def _refuse_recipes(directory: Path) -> None:
    """A directory of recipes is no model, but each of them names one."""
    from mindvl_cli.load import top_keys

    if (directory / "config.json").exists():
        return
    recipes = [str(path) for path in sorted(directory.glob("*.yaml")) if "phase" in top_keys(path)]
    if recipes:
        raise CliError(
            f"{directory} is no model directory: it has no config.json. mindvl plan. Name one of its recipes: "
            f"{', '.join(recipes)}."
        )


def _machine(options: dict[str, Any]) -> "Machine":
    from mindvl_train.devices import DEVICES, find_device
    from mindvl_train.layout_search import MATMUL_EFFICIENCY, Machine

    known = ", ".join(device.name.lower() for device in DEVICES)
    name = options["device_name"]
    if name is None:
        raise CliError(f"nobody says on what. mindvl plan: --device. Use one of {known}.")
    device = find_device(name)
    if device is None:
        raise CliError(f"no device is called {name!r}. mindvl plan: --device. Use one of {known}.")
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
    from mindvl_train.config import TRAINABLE
    from mindvl_train.layout_search import Request, request_of

    machine = _machine(options)
    request = Request(model=_model(model), machine=machine) if config is None else request_of(config, machine)
    pixels = options["max_pixels"]
    if pixels is not None and pixels != "auto" and not pixels.isdecimal():
        raise CliError(
            f"{pixels!r} is no number of pixels. mindvl plan: --max-pixels. Use for example 1003520 or auto."
        )
    _check_row(config, request.model, options["seq_length"], None if pixels in (None, "auto") else int(pixels))
    given = {name: options[name] for name in ("seq_length", "max_patches", "visual_share", "global_batch_size")}
    given["max_pixels"] = None if pixels in (None, "auto") else int(pixels)
    given["trained"] = TRAINABLE[options["phase"]] if options["phase"] else None
    return replace(request, **{name: value for name, value in given.items() if value is not None})


def _check_row(config: "RunConfig | None", model: "MindVLConfig", seq_length: int | None, pixels: int | None) -> None:
    """Refuse packs and images that no data section could ask for."""
    from mindvl_data import PackingConfig

    multiple = (PackingConfig if config is None else config.data.packing).pad_multiple
    if seq_length is not None and seq_length % multiple:
        raise CliError(
            f"{seq_length} tokens are no multiple of {multiple}, to which packs are padded. mindvl plan: --seq-length. "
            f"Use {max(1, seq_length // multiple) * multiple}."
        )
    least = (model.vision.patch_size * model.vision.spatial_merge_size) ** 2
    least = least if config is None else max(least, config.data.image.min_pixels)
    if pixels is not None and pixels < least:
        raise CliError(
            f"{pixels} pixels are fewer than the smallest image has. mindvl plan: --max-pixels. Use {least} or more."
        )


def _find(request: "Request", model: str, config: "RunConfig | None", *, top: int, widest: bool) -> dict[str, Any]:
    """All that is shown, as one document."""
    from mindvl_train.layout_search import BUDGETS, days, largest_pixels, room, search

    task = request.task()
    found = search(task, keep=top)
    best = found.plans[0] if found.plans else None
    name = config.model.size if config is not None and config.model.size else model
    return {
        "model": name,
        "device": request.machine.device.name,
        "devices": request.machine.num_devices,
        "seq_length": request.seq_length,
        "max_pixels": request.max_pixels,
        "visual_limit": request.visual_limit,
        "global_batch_size": request.global_batch_size,
        "trained": list(request.trained),
        "limit": task.limit,
        "tokens_per_step": request.global_batch_size * request.seq_length,
        "fitting": found.num_fitting,
        "too_large": found.num_full,
        "refused": dict(found.refused.most_common()),
        "plans": [_described(request, one) for one in found.plans],
        "misses": [_described(request, one) for one in found.misses[:3]],
        "largest_max_pixels": largest_pixels(request, best) if best is not None and widest else None,
        "room": [vars(one) for one in room(request, best)] if best is not None else [],
        "days": [vars(one) for one in days(request, best, BUDGETS[name])]
        if best is not None and name in BUDGETS
        else [],
    }


def _described(request: "Request", plan: "Plan") -> dict[str, Any]:
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
    """The recipe with the best layout, or its sections alone where no recipe was given; returns what to say of it."""
    from mindvl_cli.load import to_yaml
    from mindvl_model.parallel_config import ParallelConfig, RecomputeConfig

    if not document["plans"]:
        return ""
    best = document["plans"][0]
    fitted = best["parallel"] | {
        "stage_layers": best["parallel"]["stage_layers"] and tuple(best["parallel"]["stage_layers"])
    }
    if config is None:
        sections = {
            "global_batch_size": request.global_batch_size,
            "precision": "bf16",
            "parallel": best["parallel"],
            "recompute": best["recompute"],
            "optimizer": {"offload": best["offload"]},
        }
        write_whole(out, to_yaml(sections))
        return f"sections for a recipe: {out}"
    image = config.data.image
    pixels = document["largest_max_pixels"] or request.max_pixels
    packing = replace(config.data.packing, seq_length=request.seq_length, max_patches=request.max_patches)
    planned = replace(
        config,
        global_batch_size=request.global_batch_size,
        parallel=ParallelConfig(**fitted),
        recompute=RecomputeConfig(**best["recompute"]),
        optimizer=replace(config.optimizer, offload=best["offload"]),
        data=replace(config.data, packing=packing, image=replace(image, max_pixels=pixels)),
    )
    write_whole(out, to_yaml(planned))
    return f"recipe: {out}. Next: mindvl train {out} --dry-run"


def _measure(config: "RunConfig", nproc: int) -> dict[str, Any]:
    """Predicted and measured bytes of every rank."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: its profiler logs errors where no GPU is
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
