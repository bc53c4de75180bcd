# SPDX-License-Identifier: Apache-2.0
"""A reserved port goes to no process that asks the system for a free one, and to a store that names it."""

import socket
import sys
from contextlib import ExitStack
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from mindvl_ops.runtime.ports import reserved_port


def test_a_store_listens_at_a_reserved_port() -> None:
    with reserved_port() as port:
        store = TCPStore("127.0.0.1", port, 1, is_master=True, timeout=timedelta(seconds=60))
        store.set("key", "value")
        peer = TCPStore("127.0.0.1", port, 1, is_master=False, timeout=timedelta(seconds=60))
        assert peer.get("key") == b"value"


@pytest.mark.skipif(sys.platform != "linux", reason="the port is held on Linux only")
def test_a_reserved_port_is_not_free() -> None:
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(200)]
        assert len(set(ports)) == len(ports)
        for port in ports:
            other = stack.enter_context(socket.socket())  # without SO_REUSEADDR, as gloo
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
    with socket.socket() as later:
        later.bind(("127.0.0.1", ports[0]))
