# SPDX-License-Identifier: Apache-2.0
"""The line of the project or of megatron-core that is running, as a module path."""

import sys
from typing import Any

_MARKS = ("/mindvl_", "/megatron/core/")
_SELF = ("/mindvl_train/rehearsal/", "/mindvl_model/accelerator/")


def calling_line(depth: int = 2) -> tuple[str, str]:
    """(nearest line of mindvl or megatron-core, nearest line of mindvl), such as "mindvl_train/step.py:61"."""
    frame: Any = sys._getframe(depth)
    near = ours = ""
    while frame is not None and not ours:
        path = frame.f_code.co_filename
        if not any(each in path for each in _SELF):
            for mark in _MARKS:
                if mark in path:
                    line = f"{path[path.rindex(mark) + 1 :]}:{frame.f_lineno}"
                    near = near or line
                    ours = line if mark == "/mindvl_" else ours
        frame = frame.f_back
    return near or "?", ours or "?"


def running(*functions: str) -> tuple[str, dict[str, Any]]:
    """Name and local variables of the nearest running function among these names; ("", {}) if none is running."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in functions:
            return frame.f_code.co_name, frame.f_locals
        frame = frame.f_back
    return "", {}
