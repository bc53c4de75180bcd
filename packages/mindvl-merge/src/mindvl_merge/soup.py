# SPDX-License-Identifier: Apache-2.0
"""Greedy soup: average only the models that raise a score. Source: Wortsman et al., "Model soups", 2022, recipe 1.

Comes above run.py. Models are added in the order of their own scores; a model stays if the average with it scores at least as
well.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .adapters import FOLD_HINT, are_adapters
from .config import MergeConfig
from .errors import MergeConfigError
from .files import real_path
from .manifest import MANIFEST_NAME
from .output_path import check_paths
from .run import merge

Score = Callable[[Path], float]  # model directory -> score, higher is better

_SCORES_NAME = "scores.json"


def greedy_soup(
    config: MergeConfig,
    score: Score,
    *,
    scored_by: str = "",
    recorded: MergeConfig | None = None,
) -> dict[str, Any]:
    """Choose models by score and average them with equal weights.

    Args:
        config: A merge with method average and without weights.
        score: Scores a model directory on items that are used for nothing else. It is called once for each model and for each
            average; scores are kept beside the output until the soup is complete, so that an interrupted one continues.
        recorded: Configuration for the manifest where the models were converted from other directories, in the same order.
        scored_by: Identifies what `score` measures; scores that were kept for something else are not used.

    Returns:
        The manifest, with the decision on every model under `soup`, also written to `merge.json`.

    Raises:
        MergeError: As for `merge`; the configuration has another method or weights.
    """
    if config.method != "average" or config.weights is not None or config.part_weights:
        raise MergeConfigError("method: a greedy soup is an average with equal weights. Remove method and weights.")
    if are_adapters(config):
        raise MergeConfigError(f"{config.models[0]}: is an adapter, and a greedy soup scores whole models. {FOLD_HINT}")
    check_paths(config)
    out = real_path(config.out)
    scratch = out.parent / f".{out.name}.soup"
    scratch.mkdir(parents=True, exist_ok=True)
    scores = _Scores(config, score, scratch, scored_by)
    alone = {model: scores.of([model]) for model in config.models}
    names = dict(zip(config.models, (recorded or config).models, strict=True))
    order = sorted(config.models, key=lambda model: -alone[model])
    kept, best = [order[0]], alone[order[0]]
    decisions = [{"model": str(names[order[0]]), "score": best, "score_with": best, "kept": True}]
    for model in order[1:]:
        found = scores.of([*kept, model])
        decisions.append(
            {"model": str(names[model]), "score": alone[model], "score_with": found, "kept": found >= best}
        )
        if found >= best:
            kept, best = [*kept, model], found
    chosen = replace(recorded or config, models=tuple(names[model] for model in kept))
    document = merge(replace(config, models=tuple(kept)), recorded=chosen) | {"soup": decisions}
    path = out / MANIFEST_NAME
    unfinished = path.with_name(f".{MANIFEST_NAME}.unfinished")
    unfinished.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)
    shutil.rmtree(scratch, ignore_errors=True)
    return document


class _Scores:
    """Scores of models and averages by the paths of the models, kept in a file."""

    def __init__(self, config: MergeConfig, score: Score, scratch: Path, scored_by: str) -> None:
        self._config = config
        self._score = score
        self._scratch = scratch
        self._scored_by = [scored_by, config.only, config.dtype, config.match_tokens]
        path = scratch / _SCORES_NAME
        self._known: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def of(self, models: Sequence[Path]) -> float:
        """The score of the average of some models."""
        files = [file for model in models for file in sorted(real_path(model).glob("*.safetensors"))]
        state = sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
        key = json.dumps([self._scored_by, state])
        if key not in self._known:
            if len(models) == 1:
                found = self._score(models[0])
            else:
                average = self._scratch / "average"
                merge(replace(self._config, models=tuple(models), out=average, overwrite=True))
                found = self._score(average)
                shutil.rmtree(average)
            self._known[key] = found
            unfinished = self._scratch / f"{_SCORES_NAME}.unfinished"
            unfinished.write_text(json.dumps(self._known), encoding="utf-8")
            unfinished.replace(self._scratch / _SCORES_NAME)
        return self._known[key]
