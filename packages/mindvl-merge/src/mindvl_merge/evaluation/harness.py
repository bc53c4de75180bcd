# SPDX-License-Identifier: Apache-2.0
"""Run text benchmarks of lm-eval (the extra `text`) with the language model of a predictor.

Comes beside run.py: lm-eval reads the data, builds the prompts and scores the answers; its figures are kept as they are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.predict import Predictor

PREFIX = "lm-eval:"  # of a benchmark's name


def run_tasks(predictor: Predictor, name: str, *, cache: Path | None = None) -> dict[str, dict[str, float]]:
    """Figures of lm-eval tasks by task and metric.

    The chat template is applied if the tokenizer has one. Answers are kept in the file `cache` with one row each, so that an
    interrupted run continues.

    Args:
        name: Task or group of lm-eval, or a directory of task files, whose tasks are all run.

    Raises:
        EvaluationError: lm-eval is not installed, the task is unknown, or the predictor uses several devices.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise EvaluationError(
            f"{PREFIX}{name}: lm-eval is not installed. Install it with pip install 'mindvl-merge[text]'."
        ) from error
    if len(predictor.config.devices) > 1:
        raise EvaluationError(
            f"{PREFIX}{name}: runs on one device, got --device {predictor.config.device}. Name one device."
        )
    directory = Path(name)
    manager = TaskManager(include_path=str(directory), include_defaults=False) if directory.is_dir() else TaskManager()
    tasks = sorted(manager.all_tasks) if directory.is_dir() else [name]
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown or not tasks:
        raise EvaluationError(
            f"{PREFIX}{name}: is neither a directory with task files nor a task of lm-eval. `lm-eval ls tasks` lists its tasks."
        )
    predictor.load_all()
    tokenizer = getattr(predictor.processor, "tokenizer", predictor.processor)
    model = HFLM(pretrained=predictor.model, tokenizer=tokenizer, batch_size=predictor.config.batch_size)
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
    found = simple_evaluate(
        model,
        tasks=tasks,
        task_manager=manager,
        apply_chat_template=bool(tokenizer.chat_template),
        use_cache=None if cache is None else f"{cache}-{predictor.fingerprint[:16]}",
        log_samples=False,
        bootstrap_iters=0,
    )
    return {task: _figures(values) for task, values in found["results"].items()}


def _figures(values: Mapping[str, Any]) -> dict[str, float]:
    """Figures by metric; a filter other than `none` is part of the name, as in `exact_match,strict-match`."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and "," in name and "_stderr," not in name
    }
