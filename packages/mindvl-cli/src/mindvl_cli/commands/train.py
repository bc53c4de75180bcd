# SPDX-License-Identifier: Apache-2.0
"""`mindvl train`: one phase from a recipe; also what a launcher such as torchrun starts in every process."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mindvl_train import RunConfig


@click.command(epilog="Example: mindvl train recipes/tiny/sft.yaml schedule.steps=50 out=runs/try")
@click.argument("recipe", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--resume",
    default="auto",
    show_default=True,
    metavar="auto|never|PATH",
    help="Go on from the newest checkpoint in `out`; refuse to; or name a checkpoint.",
)
@click.option("--nproc", default=1, show_default=True, type=click.IntRange(min=1), help="Processes on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")
def train(recipe: Path, overrides: tuple[str, ...], resume: str, nproc: int, as_json: bool) -> None:
    """Train one phase from RECIPE; run again to continue where it stopped.

    KEY=VALUE changes one value of the recipe, with dots between levels: schedule.peak_lr=1e-3.
    """
    from mindvl_cli.load import load_config
    from mindvl_train import RunConfig

    config = load_config(recipe, RunConfig, overrides)
    result_file = config.out / "result.json"
    if nproc > 1 and "RANK" not in os.environ:
        from mindvl_train.launch import launch

        words = [str(recipe), *overrides, "--resume", resume]
        launch([sys.executable, "-m", "mindvl_cli.main", "train", *words], nproc)
    else:
        _train_here(config, resume, result_file)
    if "RANK" in os.environ:
        return
    result = json.loads(result_file.read_text())
    if as_json:
        click.echo(json.dumps(result))
    else:
        how = "finished" if result["finished"] else "stopped"
        click.echo(f"{how} at step {result['step']}: {result['checkpoint']}")
    if not result["finished"]:
        sys.exit(75)  # EX_TEMPFAIL: a scheduler may start it again


def _train_here(config: "RunConfig", resume: str, result_file: Path) -> None:
    from mindvl_cli.load import to_yaml
    from mindvl_cli.logs import set_up_logging
    from mindvl_cli.progress import progress
    from mindvl_train import run_training
    from mindvl_train.launch import end_with_launcher

    end_with_launcher()
    rank = int(os.environ.get("RANK", "0"))
    config.out.mkdir(parents=True, exist_ok=True)
    verbose = bool(click.get_current_context().find_root().params.get("verbose"))
    set_up_logging(rank=rank, log_dir=config.out / "logs", verbose=verbose)
    choice: Any = resume if resume in ("auto", "never") else Path(resume)
    if rank:
        run_training(config, resume=choice)
        return
    _write_whole(config.out / "recipe.yaml", to_yaml(config))
    with progress(f"train {config.phase}", total=config.schedule.steps, unit="steps") as advance:
        done = 0

        def on_step(step: int, loss: float | None) -> None:
            nonlocal done
            advance(step - done, note=None if loss is None else f"loss {loss:.3f}")
            done = step

        result = run_training(config, resume=choice, on_step=on_step)
    document = {
        "out": str(result.out),
        "step": result.step,
        "finished": result.finished,
        "checkpoint": str(result.checkpoint),
        "data": result.data,
    }
    _write_whole(result_file, json.dumps(document, indent=1) + "\n")


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.unfinished")
    temporary.write_text(text)
    os.replace(temporary, path)
