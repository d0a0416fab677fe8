"""Takes a socket that listens inside a sandbox, by which the gateway serves it without a process inside.

`proxy_listener.py` makes it there, before anything of the policy runs, and hands it over through a socket file.
"""

from __future__ import annotations

import socket
from pathlib import Path

import anyio


class SocketHandover:
    """The socket file by which one sandbox hands its listening socket over, once."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(file))
        self._listening.listen(1)
        self._listening.setblocking(False)

    def close(self) -> None:
        """Ends the wait for the sandbox."""
        self._listening.close()

    async def receive(self) -> socket.socket:
        """The socket; raises OSError where the sandbox gave none."""
        await anyio.wait_readable(self._listening)
        with self._listening.accept()[0] as sandbox:
            anyio.notify_closing(self._listening)
            self._listening.close()  # Whatever runs inside later finds nobody here.
            sandbox.setblocking(False)
            await anyio.wait_readable(sandbox)
            _, descriptors, _, _ = socket.recv_fds(sandbox, 1, 1)
            if not descriptors:
                raise OSError("the sandbox handed no socket over")
            received = socket.socket(fileno=descriptors[0])
            received.setblocking(False)
            sandbox.send(b"1")
        return received
