# SPDX-License-Identifier: Apache-2.0
"""Reserve a port of this machine for the processes of a run, which meet at it.

Used by the launcher of mindvl-train and by tests that start processes.
"""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Inside the block the system assigns this port of 127.0.0.1 to no other process, but one that names it may listen.

    The listening process has to set SO_REUSEADDR, as torch's TCPStore and most servers do. Processes take seconds until they
    listen; meanwhile gloo asks the system for ports, and would get one that is only free.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":  # others deliver connections to the holder, which does not listen
            holder.close()
        yield port
