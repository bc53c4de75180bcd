# SPDX-License-Identifier: Apache-2.0
"""Layouts that fit, their memory and their time, before a device is booked."""

from mindvl_train.layout_search.memory import Memory
from mindvl_train.layout_search.request import BUDGETS, Request, days, largest_pixels, request_of, room
from mindvl_train.layout_search.search import Plan, Search, Task, evaluate, search, with_stage_layers
from mindvl_train.layout_search.step_time import MATMUL_EFFICIENCY, Machine, StepTime

__all__ = [
    "BUDGETS",
    "MATMUL_EFFICIENCY",
    "Machine",
    "Memory",
    "Plan",
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
