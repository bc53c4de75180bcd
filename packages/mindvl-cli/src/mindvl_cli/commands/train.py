# SPDX-License-Identifier: Apache-2.0
"""`mindvl train`: one phase from a recipe; also what a launcher such as torchrun starts in every process."""

import getpass
import json
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mindvl_cli.progress import Advance
    from mindvl_train import RunConfig

STOPPED = 75  # EX_TEMPFAIL: asked to stop, saved; a scheduler may start it again


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
@click.option(
    "--accept-data-change",
    is_flag=True,
    help="Go on although shards of a source changed, or sources came or went; who said so is kept in the ledger.",
)
@click.option("--nproc", default=1, show_default=True, type=click.IntRange(min=1), help="Processes on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")
@click.option("--launched", is_flag=True, hidden=True)
def train(
    recipe: Path,
    overrides: tuple[str, ...],
    resume: str,
    accept_data_change: bool,
    nproc: int,
    as_json: bool,
    launched: bool,
) -> None:
    """Train one phase from RECIPE; run again to continue where it stopped.

    KEY=VALUE changes one value of the recipe, with dots between levels: schedule.peak_lr=1e-3.
    """
    from mindvl_cli.load import load_config
    from mindvl_train import RunConfig

    config = load_config(recipe, RunConfig, overrides)
    result_file = config.out / "result.json"
    if nproc > 1 and "RANK" not in os.environ:  # not started by torchrun or a scheduler already
        from mindvl_cli.machine import num_cores
        from mindvl_train.launch import launch

        words = [*(["-v"] if _is_verbose() else []), "train", str(recipe), *overrides, "--resume", resume, "--launched"]
        words += ["--accept-data-change"] if accept_data_change else []
        threads = max(1, num_cores() // nproc)
        launch([sys.executable, "-m", "mindvl_cli.main", *words], nproc, threads_per_process=threads)
        result = json.loads(result_file.read_text())
    else:
        result = _train_here(config, resume, result_file, accepted_by=_who() if accept_data_change else None)
    if launched:
        return  # the launching command speaks for all
    if int(os.environ.get("RANK", "0")) == 0:
        how = "finished" if result["finished"] else "stopped"
        text = f"{how} at step {result['step']}: {result['checkpoint']}"
        click.echo(json.dumps(result) if as_json else text)
    if not result["finished"]:
        sys.exit(STOPPED)


def _train_here(config: "RunConfig", resume: str, result_file: Path, *, accepted_by: str | None) -> dict[str, Any]:
    from mindvl_cli.load import to_yaml
    from mindvl_cli.logs import set_up_logging
    from mindvl_cli.progress import progress
    from mindvl_train import run_training
    from mindvl_train.launch import end_with_launcher

    end_with_launcher()
    rank = int(os.environ.get("RANK", "0"))
    set_up_logging(rank=rank, log_dir=config.out / "logs", verbose=_is_verbose())
    choice: Any = resume if resume in ("auto", "never") else Path(resume)
    with ExitStack() as stack:
        done: int | None = None
        bar: Advance | None = None

        def on_step(step: int, loss: float | None) -> None:
            nonlocal done, bar
            if rank:
                return
            if done is None or bar is None:  # only now is it known that the run was accepted, and where it resumed
                _write_whole(config.out / "recipe.yaml", to_yaml(config))
                done, steps = step, config.schedule.steps
                bar = stack.enter_context(progress(f"train {config.phase}", total=steps, unit="steps", done=done))
            bar(step - done, note=None if loss is None else f"loss {loss:.3f}")
            done = step

        result = run_training(config, resume=choice, accept_data_change=accepted_by, on_step=on_step)
    document = {
        "out": str(result.out),
        "step": result.step,
        "finished": result.finished,
        "checkpoint": str(result.checkpoint),
        "data": result.data,
    }
    if not rank:
        _write_whole(result_file, json.dumps(document, indent=1) + "\n")
    return document


def _who() -> str:
    """user@host, as far as the system knows them."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _is_verbose() -> bool:
    return bool(click.get_current_context().find_root().params.get("verbose"))


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.unfinished")
    temporary.write_text(text)
    os.replace(temporary, path)
