"""Runs a Python function in a child process, and has the messages between the child and the process that started it.

    python -m gateway.process.child_entry gateway.native.process_worker:serve
    python -I -S child_entry.py /path/to/file.py:serve WORD ...

The function gets the words. Only the standard library is used here: sandboxes and Pythons of other frameworks have this
file and not the package. A file that runs so may import this module by its full name all the same.

A message is a header, with the number of a request and the length of the body, and the body. An answer has the number
of its request.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from struct import Struct
from types import ModuleType
from typing import Any

HEADER = Struct(">QQ")
MAX_BODY_BYTES = 64 * 2**20
"""A longer message is not read: its sender is ended."""
NAME = "gateway.process.child_entry"


def pack_header(request: int, body: bytes) -> bytes:
    """What precedes a body. Raises ValueError if it is too long to be read."""
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"an answer of {len(body) >> 20} MB is too long; {MAX_BODY_BYTES >> 20} MB are the most")
    return HEADER.pack(request, len(body))


class Wire:
    """The child's end of the messages."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = os.fdopen(requests, "rb"), answers

    @classmethod
    def claim(cls, *, keeps_output: bool = True) -> Wire:
        """Takes standard input and output for messages. Others find an empty input; what they print goes to standard
        error, or nowhere."""
        wire = cls(os.dup(0), os.dup(1))
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2 if keeps_output else null, 1)
        os.close(null)
        return wire

    def receive(self) -> tuple[int, bytes] | None:
        """The next request and its number; None once the other side is gone."""
        header = self._requests.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        request, length = HEADER.unpack(header)
        body = self._requests.read(length)
        return (request, body) if len(body) == length else None

    def send(self, request: int, body: bytes) -> None:
        """Sends the answer to a request. Raises ValueError for one that is too long."""
        header = pack_header(request, body)
        for part in (header + body,) if len(body) <= 65536 else (header, body):
            left = memoryview(part)
            while left:
                left = left[os.write(self._answers, left) :]

    def send_value(self, request: int, value: Any) -> None:
        """Answers a request; what JSON lacks is sent as text. An answer that is too long costs its own request."""
        try:
            self.send(request, json.dumps({"ok": value}, default=str).encode())
        except ValueError as error:
            self.send_problem(request, str(error))

    def send_problem(self, request: int, problem: str, remedy: str = "") -> None:
        """Refuses a request."""
        self.send(request, json.dumps({"error": {"problem": problem[:4000], "remedy": remedy}}).encode())


def answer_requests(wire: Wire, answer: Callable[[Any], Any]) -> None:
    """Answers requests, which are JSON as their answers are, one after the other until the other side is gone."""
    while (message := wire.receive()) is not None:
        wire.send(message[0], json.dumps(answer(json.loads(message[1]))).encode())


def load_file(name: str, file: str | os.PathLike[str]) -> ModuleType:
    """Imports a file as a module of this name, without its folder on the path. Raises ImportError if it is none."""
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Calls the function that the first argument names, with the others."""
    sys.modules[NAME] = sys.modules["__main__"]
    place, _, function = sys.argv[1].rpartition(":")
    words, sys.argv[1:] = sys.argv[2:], []
    if not place.endswith(".py"):
        getattr(import_module(place), function)(*words)
        return
    if not sys.flags.isolated:
        sys.path[0] = os.getcwd()  # Instead of this file's folder, whose modules are nobody else's.
    getattr(load_file(os.path.basename(place)[: -len(".py")], place), function)(*words)


if __name__ == "__main__":
    main()
