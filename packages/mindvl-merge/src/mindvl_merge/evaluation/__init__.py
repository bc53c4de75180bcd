# SPDX-License-Identifier: Apache-2.0
"""Score models: benchmark files in, predictions, metrics and resolution search out.

Usable alone: no other package of mindvl is imported, torch and transformers only when a model answers. The caller passes
the image decoder and the loader of models (`predict.ImageDecoder`, `predict.Loader`), so that evaluation shows a model
the pixels that training showed it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .benchmark import Benchmark, EmbeddedImage, Item
    from .choice import Box, CellScore, Holdout, Interval, box_of, choose_cell, pareto_front, scores_over_grid
    from .conversation import Conversation
    from .endpoint import Endpoint, EndpointConfig
    from .harness import PREFIX, run_tasks
    from .metrics import METRICS, aggregate, find_metric, score
    from .predict import PredictConfig, Predictor
    from .predictions import Prediction
    from .readers import load_benchmarks
    from .remote import RemotePredictor, endpoint_judge
    from .resolution import Cell, ResolutionGrid
    from .run import Evaluation, evaluate, search_model
    from .search import Request, ResolutionSearch, Scorer, search_resolution

_MODULES = {
    "benchmark": ("Benchmark", "EmbeddedImage", "Item"),
    "choice": ("Box", "CellScore", "Holdout", "Interval", "box_of", "choose_cell", "pareto_front", "scores_over_grid"),
    "conversation": ("Conversation",),
    "endpoint": ("Endpoint", "EndpointConfig"),
    "harness": ("PREFIX", "run_tasks"),
    "metrics": ("METRICS", "aggregate", "find_metric", "score"),
    "predict": ("PredictConfig", "Predictor"),
    "predictions": ("Prediction",),
    "readers": ("load_benchmarks",),
    "remote": ("RemotePredictor", "endpoint_judge"),
    "resolution": ("Cell", "ResolutionGrid"),
    "run": ("Evaluation", "evaluate", "search_model"),
    "search": ("Request", "ResolutionSearch", "Scorer", "search_resolution"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "METRICS",
    "PREFIX",
    "Benchmark",
    "Box",
    "Cell",
    "CellScore",
    "Conversation",
    "EmbeddedImage",
    "Endpoint",
    "EndpointConfig",
    "Evaluation",
    "Holdout",
    "Interval",
    "Item",
    "PredictConfig",
    "Prediction",
    "Predictor",
    "RemotePredictor",
    "Request",
    "ResolutionGrid",
    "ResolutionSearch",
    "Scorer",
    "aggregate",
    "box_of",
    "choose_cell",
    "endpoint_judge",
    "evaluate",
    "find_metric",
    "load_benchmarks",
    "pareto_front",
    "run_tasks",
    "score",
    "scores_over_grid",
    "search_model",
    "search_resolution",
]

if not TYPE_CHECKING:  # a type checker would accept every name otherwise

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
