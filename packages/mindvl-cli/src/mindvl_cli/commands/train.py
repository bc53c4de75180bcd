# SPDX-License-Identifier: Apache-2.0
"""`mindvl train`: one phase from a recipe; also what a launcher such as torchrun starts in every process."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import click


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
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")
def train(recipe: Path, overrides: tuple[str, ...], resume: str, as_json: bool) -> None:
    """Train one phase from RECIPE; run again to continue where it stopped.

    KEY=VALUE changes one value of the recipe, with dots between levels: schedule.peak_lr=1e-3.
    """
    from mindvl_cli.load import load_config, to_yaml
    from mindvl_cli.logs import set_up_logging
    from mindvl_cli.progress import progress
    from mindvl_train import RunConfig, run_training

    config = load_config(recipe, RunConfig, overrides)
    rank = int(os.environ.get("RANK", "0"))
    config.out.mkdir(parents=True, exist_ok=True)
    verbose = bool(click.get_current_context().find_root().params.get("verbose"))
    set_up_logging(rank=rank, log_dir=config.out / "logs", verbose=verbose)
    if rank == 0:
        _write_whole(config.out / "recipe.yaml", to_yaml(config))
    choice: Any = resume if resume in ("auto", "never") else Path(resume)
    with progress(f"train {config.phase}", total=config.schedule.steps, unit="steps") as advance:
        done = 0

        def on_step(step: int, loss: float | None) -> None:
            nonlocal done
            advance(step - done, note=None if loss is None else f"loss {loss:.3f}")
            done = step

        result = run_training(config, resume=choice, on_step=on_step)
    if rank:
        return
    summary = {
        "out": str(result.out),
        "step": result.step,
        "finished": result.finished,
        "checkpoint": str(result.checkpoint),
        "data": result.data,
    }
    if as_json:
        click.echo(json.dumps(summary))
        return
    click.echo(f"{'finished' if result.finished else 'stopped'} at step {result.step}: {result.checkpoint}", err=True)
    if not result.finished:
        sys.exit(75)  # EX_TEMPFAIL: a scheduler may start it again


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.unfinished")
    temporary.write_text(text)
    os.replace(temporary, path)
