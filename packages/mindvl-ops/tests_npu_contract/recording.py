# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: write every call that tests make on the simulator to the file named by NPU_CALLS, each once."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mindvl_ops.testing.fake_npu import state

_calls: dict[str, None] = {}  # in order, each once
_running = state.running


@contextmanager
def _recorded(simulation: state.Simulation) -> Iterator[None]:
    with _running(simulation):
        yield
    for call in simulation.calls:
        if call.outputs is not None:  # refused calls show nothing
            _calls[json.dumps(call.to_json(), sort_keys=True)] = None


def pytest_configure() -> None:
    """Stand between the simulator and its tests."""
    state.running = _recorded


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was recorded."""
    Path(os.environ["NPU_CALLS"]).write_text("[" + ",\n".join(_calls) + "]")
