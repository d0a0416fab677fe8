"""The Python process of a rollout: runs code and keeps its variables; the value of a last expression is printed.

Run by `child_entry.py` inside a sandbox. Arguments: the descriptors of requests and answers. Figures of matplotlib
that the code leaves open come back as PNG images.
"""

from __future__ import annotations

import ast
import base64
import fcntl
import io
import json
import os
import signal
import sys
import traceback
import types
from contextlib import suppress
from typing import Any

from gateway.process.child_entry import Wire

MOST_IMAGES = 8


class Streams:
    """The standard streams and hooks, which code may close or replace: each call begins with them as they were."""

    def __init__(self) -> None:
        self._descriptors = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 64) for number in range(3)]
        self._files: dict[str, Any] = {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr")}
        self._hooks = {name: getattr(sys, name) for name in ("displayhook", "excepthook", "unraisablehook")}

    def restore(self) -> None:
        for number, (name, file) in enumerate(self._files.items()):
            os.dup2(self._descriptors[number], number)
            if file is None or file.closed:
                file = self._files[name] = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
            setattr(sys, name, file)
        for name, hook in self._hooks.items():
            setattr(sys, name, hook)


def run_code(code: str, names: dict[str, Any]) -> str:
    """Runs code; returns the traceback of what it raised, or nothing."""
    try:
        tree = ast.parse(code, "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), names)  # noqa: S102 - the policy's code, confined
        if isinstance(last, ast.Expr):
            sys.displayhook(eval(compile(ast.Expression(last.value), "<code>", "eval"), names))  # noqa: S307 - as above
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    except SystemExit as error:
        return f"SystemExit: {error}"
    except BaseException as error:
        lines = traceback.format_exception(error)
        first = next((index for index, line in enumerate(lines) if 'File "<code>"' in line), 1)
        return "".join([lines[0], *lines[first:]]) if len(lines) > 1 else "".join(lines)
    return ""


def figures() -> list[str]:
    """The open figures of matplotlib, if the code uses it, as PNG; they are closed."""
    plots = sys.modules.get("matplotlib.pyplot")
    images = []
    for number in plots.get_fignums()[:MOST_IMAGES] if plots else ():
        data = io.BytesIO()
        plots.figure(number).savefig(data, format="png")  # type: ignore[union-attr]
        images.append(base64.b64encode(data.getvalue()).decode())
    if plots:
        plots.close("all")
    return images


def ignore_interrupts() -> None:
    """Code is interrupted; what comes too late for that would end this process with its variables."""
    while signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        with suppress(KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def serve(requests: str, answers: str) -> None:
    """Answers requests until they end."""
    ignore_interrupts()
    for descriptor in (requests, answers):
        os.set_inheritable(int(descriptor), False)
    wire, me = Wire(int(requests), int(answers)), os.getpid()
    sys.argv[:] = [""]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.path.insert(0, os.getcwd())
    streams = Streams()
    while (message := wire.receive()) is not None:
        streams.restore()
        code = json.loads(message[1])["code"]
        reply: dict[str, Any] = {"error": "", "images": []}
        with suppress(KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            reply["error"] = run_code(code, vars(module))
            try:
                reply["images"] = figures()
            except Exception as error:
                reply["error"] = reply["error"] or f"{type(error).__name__}: {error}"
        ignore_interrupts()
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if os.getpid() != me:  # The code has forked: a child ends with it.
            os._exit(0)
        wire.send(message[0], json.dumps(reply).encode())
