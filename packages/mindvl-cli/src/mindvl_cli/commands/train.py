# SPDX-License-Identifier: Apache-2.0
"""`mindvl train`: train from a recipe, or run the training stages of a pipeline file; also started by torchrun.

Comes after pipeline_file.py has read the file; mindvl_train does the work.
"""

import getpass
import json
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindvl_cli.commands.options import AS_JSON, OVERRIDES, RECIPE, count_option
from mindvl_cli.failures import CliError, one_line
from mindvl_cli.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mindvl_cli.progress import Advance
    from mindvl_train import RunConfig
    from mindvl_train.phases import Stage


@click.command(epilog="Example: mindvl train recipes/tiny/sft.yaml schedule.steps=50 out=runs/try")
@RECIPE
@OVERRIDES
@click.option(
    "--resume",
    default="auto",
    show_default=True,
    metavar="auto|never|PATH",
    help="Checkpoint to resume from; auto: the newest in `out`; never: exit with an error if `out` holds a checkpoint.",
)
@click.option(
    "--accept-data-change",
    is_flag=True,
    help="Resume although shards changed, or sources were added or removed; your user name is written to the run's audit log.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Summarize the run and its missing files without training; --nproc may exceed the devices of this machine.",
)
@count_option("--nproc", default=1, help="Processes on this machine.")
@count_option(
    "--max-restarts",
    least=0,
    default=0,
    help="Maximum number of restarts of all processes after one fails; requires --nproc 2 or more.",
)
@AS_JSON
@click.option("--launched", is_flag=True, hidden=True)
def train(
    recipe: Path,
    overrides: tuple[str, ...],
    resume: str,
    accept_data_change: bool,
    dry_run: bool,
    nproc: int,
    max_restarts: int,
    as_json: bool,
    launched: bool,
) -> None:
    """Train from RECIPE, a recipe or a pipeline file.

    The same command resumes an interrupted run. KEY=VALUE overrides one value of the recipe, with dots between levels:
    schedule.peak_lr=1e-3. With a pipeline file it overrides the recipe of every training stage, and out=DIRECTORY the
    output directory of the pipeline. On several machines, start the command with torchrun or Slurm
    (docs/guides/cluster.md).

    SIGTERM and SIGUSR1 save a checkpoint and exit with code 75, so that a scheduler can restart the run. Code 65: the
    data was used up before the schedule ended, and a checkpoint was saved. Code 79: a process made no progress; the
    log names it.
    """
    if max_restarts and resume != "auto":
        raise click.UsageError(
            f"--max-restarts: resumes from the newest checkpoint, so it cannot be combined with --resume {resume}. Remove one "
            "of the two."
        )
    from mindvl_cli.pipeline_file import is_pipeline, load_stages

    rank, world_size = _launcher_number("RANK") or 0, _launcher_number("WORLD_SIZE")
    stages = load_stages(recipe, overrides)
    pipeline = is_pipeline(recipe)
    if pipeline and resume != "auto":
        raise click.UsageError(
            "--resume: a pipeline always resumes automatically. Remove the option, or choose another out=DIRECTORY."
        )
    if dry_run:
        if not rank:
            _show(stages, nproc, world_size, as_json)
        return
    if nproc > 1 and "RANK" not in os.environ:  # not started by torchrun or a scheduler already
        _launch(recipe, overrides, resume, accept_data_change, nproc, max_restarts)
        results = _results(stages)
    else:
        results = _train_stages(stages, resume, pipeline, accepted_by=_who() if accept_data_change else None)
    if "RANK" in os.environ:
        from mindvl_train.signals import ignore_from_now_on

        ignore_from_now_on()  # this process only has to exit with its code
    if launched:
        return  # the launching command prints the results
    if not rank:
        if as_json:
            document = {"finished": _all_finished(stages, results), "stages": results} if pipeline else results[0]
            click.echo(json.dumps(document))
        else:
            # A pipeline may have stopped before its last stage.
            for stage, result in zip(stages, results, strict=False):
                name = f"{stage.name}: " if pipeline else ""
                click.echo(f"{name}{_how(stage, result)} at step {result['step']}: {result['checkpoint']}")
    if not _all_finished(stages, results):
        from mindvl_train.signals import DATA_USED_UP, STOPPED

        sys.exit(DATA_USED_UP if results and results[-1].get("data_used_up") else STOPPED)


def _how(stage: "Stage", result: dict[str, Any]) -> str:
    """How a stage has ended."""
    if result.get("ended_early") and stage.config.validation is not None:
        patience = stage.config.validation.patience
        counted = "the last validation" if patience == 1 else f"the last {patience} validations"
        return f"finished early, because {counted} had no lower loss,"
    return "finished" if result["finished"] else "data used up" if result.get("data_used_up") else "stopped"


def _launch(
    recipe: Path, overrides: tuple[str, ...], resume: str, accept_data_change: bool, nproc: int, max_restarts: int
) -> None:
    """Run the command in `nproc` processes; exits if one of them fails."""
    from mindvl_cli.machine import num_cores
    from mindvl_train.errors import ProcessError
    from mindvl_train.launch import launch
    from mindvl_train.signals import SAVE_AND_END, STOPPED, STUCK, stop_requests

    words = [*(["-v"] if _is_verbose() else []), "train", str(recipe), *overrides, "--resume", resume, "--launched"]
    words += ["--accept-data-change"] if accept_data_change else []
    threads = max(1, num_cores() // nproc)
    command = [sys.executable, "-m", "mindvl_cli.main", *words]
    try:
        with stop_requests(forward=False):  # the result files hold the outcome
            launch(command, nproc, threads_per_process=threads, max_restarts=max_restarts)
    except ProcessError as error:
        click.echo(one_line(error), err=True)
        if -error.exit_code in SAVE_AND_END or error.exit_code == STOPPED:  # stopped before training started
            sys.exit(STOPPED)
        sys.exit(STUCK if error.exit_code == STUCK else 1)


def _launcher_number(name: str) -> int | None:
    """An environment variable that torchrun or a scheduler sets for each process."""
    value = os.environ.get(name) or None
    if value is not None and not value.isdecimal():
        raise CliError(
            f"environment variable {name}: must be an integer, got {value!r}. Unset it, or let torchrun set it."
        )
    return None if value is None else int(value)


def _show(stages: "Sequence[Stage]", nproc: int, world_size: int | None, as_json: bool) -> None:
    """Print a summary of the run; the exit code is 1 if a file is missing."""
    from mindvl_cli.pages.dry_run_text import show_dry_run

    is_given = click.get_current_context().get_parameter_source("nproc") is click.core.ParameterSource.COMMANDLINE
    if not show_dry_run(stages, nproc if is_given else world_size, as_json=as_json):
        sys.exit(1)


def _train_stages(
    stages: "Sequence[Stage]", resume: str, pipeline: bool, *, accepted_by: str | None
) -> list[dict[str, Any]]:
    """Run unfinished stages in order until the end or a stop request; returns the results of all stages so far."""
    from mindvl_train.signals import stop_requests

    finished: list[str] = []
    if pipeline:
        from mindvl_train.phases import finished_stages

        finished = finished_stages(stages, data_may_differ=accepted_by is not None)
    results: list[dict[str, Any]] = []
    # Between two stages nothing else handles a signal; the next stage then stops at once. The result files hold the outcome.
    with stop_requests(forward=False):
        for stage in stages:
            if stage.name in finished and _result_file(stage).is_file():
                results.append(json.loads(_result_file(stage).read_text()))
                continue
            results.append(_train_here(stage.config, resume, _result_file(stage), accepted_by=accepted_by))
            if not results[-1]["finished"] or results[-1]["asked_to_stop"]:
                break
    return results


def _results(stages: "Sequence[Stage]") -> list[dict[str, Any]]:
    """Results of the stages that ran, in order, up to the first that did not finish."""
    results: list[dict[str, Any]] = []
    for stage in stages:
        if not _result_file(stage).is_file() or (results and not results[-1]["finished"]):
            break
        results.append(json.loads(_result_file(stage).read_text()))
    return results


def _result_file(stage: "Stage") -> Path:
    return stage.config.out / "result.json"


def _all_finished(stages: "Sequence[Stage]", results: "Sequence[dict[str, Any]]") -> bool:
    return len(results) == len(stages) and all(result["finished"] for result in results)


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
            if done is None or bar is None:  # only now are the checks of the run done and its first step known
                write_whole(config.out / "recipe.yaml", to_yaml(config))
                done, steps = step, config.schedule.steps
                if done > 1:  # the first call follows the first step
                    click.echo(
                        f"resumed at step {done - 1} of {steps}; the logs are in {config.out / 'logs'}", err=True
                    )
                bar = stack.enter_context(progress(f"train {config.phase}", total=steps, unit="steps", done=done))
            bar(step - done, note=None if loss is None else f"loss {loss:.3f}")
            done = step

        try:
            result = run_training(config, resume=choice, accept_data_change=accepted_by, on_step=on_step)
        except OSError as error:
            error.filename = error.filename or str(config.out)  # an error of an open file has no file name
            raise
    document = {
        "out": str(result.out),
        "step": result.step,
        "finished": result.finished,
        "asked_to_stop": result.asked_to_stop,
        "ended_early": result.ended_early,
        "data_used_up": result.data_used_up,
        "checkpoint": str(result.checkpoint),
        "best_checkpoint": None if result.best_checkpoint is None else str(result.best_checkpoint),
        "data": result.data,
    }
    if not rank:
        write_whole(result_file, json.dumps(document, indent=1) + "\n")
    return document


def _who() -> str:
    """user@host, as far as they are known."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a user id without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _is_verbose() -> bool:
    return bool(click.get_current_context().find_root().params.get("verbose"))
