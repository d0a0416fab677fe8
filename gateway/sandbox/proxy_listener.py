"""Listens on a sandbox's own loopback interface and gives the socket to the gateway's proxy; then runs a command.

Run as a script inside, before the rights are given up. A socket stays in the network that it was made in, so that
nothing of the proxy runs inside. Arguments: the socket file of the proxy, the port, and the command.
"""

import os
import socket
import sys

if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", int(sys.argv[2])), backlog=128)
    with socket.socket(socket.AF_UNIX) as proxy:
        proxy.settimeout(20)
        proxy.connect(sys.argv[1])
        socket.send_fds(proxy, [b"1"], [listener.fileno()])
        if proxy.recv(1) != b"1":
            sys.exit("the proxy did not take the socket")
    listener.close()
    os.execvp(sys.argv[3], sys.argv[3:])  # noqa: S606 - the command of the sandbox
