# SPDX-License-Identifier: Apache-2.0
"""Layout search: parallel layouts that fit into memory, with estimated memory and step time."""

from mindvl_train.layout_search.memory import Memory
from mindvl_train.layout_search.request import BUDGETS, Request, days, largest_pixels, request_of, room
from mindvl_train.layout_search.search import Candidate, Search, Task, evaluate, search, with_stage_layers
from mindvl_train.layout_search.step_time import MATMUL_EFFICIENCY, Machine, StepTime

__all__ = [
    "BUDGETS",
    "MATMUL_EFFICIENCY",
    "Candidate",
    "Machine",
    "Memory",
    "Request",
    "Search",
    "StepTime",
    "Task",
    "days",
    "evaluate",
    "largest_pixels",
    "request_of",
    "room",
    "search",
    "with_stage_layers",
]
