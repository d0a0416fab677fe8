"""Listens on ports of a sandbox's own loopback interface and gives the sockets to the gateway; then runs a command.

Run as a script inside, before the rights are given up. A socket stays in the network that it was made in, so that
nothing of who serves it runs inside. Arguments: socket files, each with its port, then `--` and the command.
"""

import os
import socket
import sys


def hand_over(file: str, port: int) -> None:
    """Gives the socket that listens on a port to whoever listens at the socket file."""
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    with listener, socket.socket(socket.AF_UNIX) as gateway:
        gateway.settimeout(20)
        gateway.connect(file)
        socket.send_fds(gateway, [b"1"], [listener.fileno()])
        if gateway.recv(1) != b"1":
            sys.exit(f"the socket of port {port} was not taken")


if __name__ == "__main__":
    end = sys.argv.index("--")
    for place in range(1, end, 2):
        hand_over(sys.argv[place], int(sys.argv[place + 1]))
    os.execvp(sys.argv[end + 1], sys.argv[end + 1 :])  # noqa: S606 - the command of the sandbox
