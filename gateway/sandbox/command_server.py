"""Runs commands and Python, and reads and writes files, inside a sandbox; the gateway asks it over standard input.

Run by `child_entry.py` with `python -I -S`, so only the standard library is available. What a request starts is ended
at its deadline, with all processes that came from it.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any

from gateway.process.child_entry import HEADER, Wire, answer_requests, pack_header

CHUNK_BYTES, MAX_ANSWER_BYTES, NO_WAIT = 65536, 64 * 2**20, os.O_NONBLOCK
LEFT_OPEN_S = 0.2
"""How long output is read that a process left behind holds open."""
INTERRUPT_S = 1.0
"""How long Python may take to end an interrupted call; after that it is killed, and its variables are lost."""
TOO_LONG, KILL_ROUNDS = "it reached the time limit", 100
LIBC, DUMPABLE, FIRST_PROCESSES = ctypes.CDLL(None), 4, 64
ENDED_INSIDE = 113
"""Exit status of the first process whose child has ended. It cannot be ended from inside, so others tell of outside."""
Reply = dict[str, Any]


class Output:
    """What a command prints, up to a limit, or the end of it."""

    def __init__(self, most: int, keeps_end: bool = False) -> None:
        self.data, self.most, self.is_over, self.keeps_end = bytearray(), most, False, keeps_end

    def add(self, chunk: bytes) -> None:
        if self.keeps_end:
            self.data = (self.data + chunk)[-self.most :]
            return
        room = self.most - len(self.data)
        self.data += chunk[:room]
        self.is_over = self.is_over or len(chunk) > room

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


class Interpreter:
    """A Python process that keeps its variables between calls."""

    def __init__(self, command: list[str]) -> None:
        asks, answers = os.pipe(), os.pipe()
        ends = (asks[0], answers[1])
        self.process = start([*command, *map(str, ends)], stdin=DEVNULL, stderr=STDOUT, pass_fds=ends)
        for descriptor in ends:
            os.close(descriptor)
        self.asks, self.answers = asks[1], answers[0]
        self.output: int = self.process.stdout.fileno()
        for descriptor in (self.output, self.answers):
            os.set_blocking(descriptor, False)

    def close(self) -> None:
        for descriptor in (self.asks, self.answers):
            os.close(descriptor)
        self.process.stdout.close()


class Server:
    """Answers requests one after the other."""

    def __init__(self) -> None:
        self.interpreter: Interpreter | None = None

    def answer(self, request: dict[str, Any]) -> Reply:
        kinds = {
            "run": self.run, "python": self.python, "put": self.put, "get": self.get, "env": self.env, "end": self.end,
        }  # fmt: skip
        try:
            try:
                return kinds[request["do"]](request)
            except BlockingIOError:  # No process can be started: those that earlier calls left fill the sandbox.
                self.end_all()
                return kinds[request["do"]](request)
        except (OSError, ValueError) as error:  # A name may have a zero byte, or half a character.
            problem, name = getattr(error, "strerror", None), request.get("path") or getattr(error, "filename", None)
            return {"error": f"{problem}: {name}" if problem and name else str(problem or error)}

    def end_all(self) -> None:
        """Ends everything that was started, with the interpreter and its variables."""
        check_is_inside()
        with suppress(OSError):
            os.kill(-1, signal.SIGKILL)
        if self.interpreter is not None:
            self.interpreter.process.wait()
            self.interpreter.close()
            self.interpreter = None
        for _ in range(KILL_ROUNDS):
            if not [*running()]:
                return
            time.sleep(0.002)

    def end(self, request: dict[str, Any]) -> Reply:
        """Ends everything that was started."""
        self.end_all()
        return {}

    def env(self, request: dict[str, Any]) -> Reply:
        """Sets the environment of what is started."""
        os.environ.update(request["env"])
        return {}

    def put(self, request: dict[str, Any]) -> Reply:
        """Writes a file, or adds to one, and makes its folders. Opening a pipe does not wait for who reads it."""
        os.makedirs(os.path.dirname(os.path.abspath(request["path"])), exist_ok=True)
        how = NO_WAIT | os.O_WRONLY | os.O_CREAT | (os.O_APPEND if request["append"] else os.O_TRUNC)
        with open(os.open(request["path"], how, 0o666), "wb") as file:
            file.write(base64.b64decode(request["data"]))
        return {}

    def get(self, request: dict[str, Any]) -> Reply:
        """Reads a part of a file of a limited size. No pipe or device: opening one may wait for ever."""
        left, most = request["most"] - request["offset"], request["piece"]
        with open(os.open(request["path"], os.O_RDONLY | NO_WAIT), "rb") as file:
            if request["offset"]:
                file.seek(request["offset"])
            data = file.read(min(left, most) + 1) or b""
        if len(data) > left:
            return {"error": f"the file has more than {request['most']} bytes"}
        return {"data": base64.b64encode(data[:most]).decode(), "is_end": len(data) <= most}

    def run(self, request: dict[str, Any]) -> Reply:
        """Runs a command to its end, or to a limit."""
        before = set(running())
        errors, keeps_end = (STDOUT, True) if request.get("keeps_end") else (PIPE, False)
        process = start(request["command"], stdin=PIPE, stderr=errors, env={**os.environ, **request["env"]})
        outputs = filter(None, (process.stdout, process.stderr))
        streams = {stream: Output(request["output_bytes"], keeps_end) for stream in outputs}
        deadline = time.monotonic() + request["timeout_s"]
        reason = communicate(process, streams, base64.b64decode(request["stdin"]), deadline)
        if reason == TOO_LONG and request.get("grace_s"):
            signal_all(set(running()) - before, signal.SIGTERM)
            communicate(process, streams, b"", time.monotonic() + request["grace_s"])
        if reason:
            kill_all(before)
            process.wait()
        for stream in (process.stdin, *streams):
            with suppress(BrokenPipeError):
                stream.close()
        out, err = [*(output.text for output in streams.values()), ""][:2]
        return {"stdout": out, "stderr": err, "status": process.returncode, "stopped": reason}

    def python(self, request: dict[str, Any]) -> Reply:
        """Runs code in the interpreter that the rollout keeps."""
        interpreter = self.interpreter = self.interpreter or Interpreter(request["command"])
        before = set(running())
        out = Output(request["output_bytes"])
        reply, reason = self.ask(interpreter, request, out)
        if reply is None:
            kill_all(before - {interpreter.process.pid})
            interpreter.process.wait()
            interpreter.close()
            self.interpreter = None
            reason = reason or f"its process ended with status {interpreter.process.returncode}"
            return {"stdout": out.text, "stopped": reason, "lost": True}
        return reply | {"stdout": out.text, "stopped": reason, "lost": False}

    def ask(self, interpreter: Interpreter, request: dict[str, Any], out: Output) -> tuple[Reply | None, str]:
        """The interpreter's answer and why it was interrupted; no answer where it had to be ended."""
        body = json.dumps({"code": request["code"]}).encode()
        reason, deadline = "", time.monotonic() + request["timeout_s"]
        received = bytearray()
        with selectors.DefaultSelector() as selector:
            for descriptor in (interpreter.output, interpreter.answers):
                selector.register(descriptor, selectors.EVENT_READ)
            try:
                write_all(interpreter.asks, pack_header(0, body) + body)
                while (reply := complete_message(received)) is None:
                    if time.monotonic() < deadline and not out.is_over:
                        receive(selector, interpreter.output, deadline, received, out)
                    elif reason:
                        return None, reason
                    else:
                        reason, deadline = stop_reason(out), time.monotonic() + INTERRUPT_S
                        out.is_over, out.most = False, len(out.data) + CHUNK_BYTES
                        interpreter.process.send_signal(signal.SIGINT)
            except (OSError, EOFError):
                return None, reason
        with suppress(BlockingIOError):
            while chunk := os.read(interpreter.output, CHUNK_BYTES):
                out.add(chunk)
        return read_reply(reply), reason or (stop_reason(out) if out.is_over else "")  # It may have ended meanwhile.


def receive(selector: selectors.BaseSelector, output: int, deadline: float, received: bytearray, out: Output) -> None:
    """Waits for what the interpreter prints and answers. Raises EOFError when it has ended."""
    for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
        chunk = os.read(key.fd, CHUNK_BYTES)
        if not chunk:
            raise EOFError
        if key.fd == output:
            out.add(chunk)
        else:
            received += chunk


def complete_message(received: bytearray) -> bytes | None:
    """The message that has been received, once it is complete. Raises EOFError for one that is too long."""
    if len(received) < HEADER.size:
        return None
    _, length = HEADER.unpack_from(received)
    if length > MAX_ANSWER_BYTES:
        raise EOFError
    has_all = len(received) >= HEADER.size + length > HEADER.size
    return bytes(received[HEADER.size : HEADER.size + length]) if has_all else None


def read_reply(body: bytes) -> Reply | None:
    """The answer of the interpreter, in which anything may be written."""
    try:
        reply = json.loads(body)
        return {"error": str(reply["error"]), "images": [str(image) for image in reply["images"]]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def communicate(process: Any, streams: dict[Any, Output], stdin: bytes, deadline: float) -> str:
    """Feeds a command and reads what it prints until it ends; returns why it must be stopped, if it must."""
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        if not process.stdin.closed:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        data, last = memoryview(stdin), deadline
        while selector.get_map():
            if process.poll() is not None:
                last = min(last, time.monotonic() + LEFT_OPEN_S)
            if any(output.is_over for output in streams.values()):
                return stop_reason(next(output for output in streams.values() if output.is_over))
            left_s = last - time.monotonic()
            if left_s <= 0:
                break
            for key, _ in selector.select(min(left_s, LEFT_OPEN_S)):
                if key.fileobj is process.stdin:
                    data = feed(selector, key.fileobj, data)
                elif chunk := os.read(key.fd, CHUNK_BYTES):
                    streams[key.fileobj].add(chunk)
                else:
                    selector.unregister(key.fileobj)
    with suppress(TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
    return "" if process.returncode is not None else TOO_LONG


def feed(selector: selectors.BaseSelector, stdin: Any, data: memoryview) -> memoryview:
    """Writes a part of the input; returns the rest. A command may end without reading it."""
    with suppress(BlockingIOError):
        try:
            data = data[os.write(stdin.fileno(), data[:CHUNK_BYTES]) if data else 0 :]
        except BrokenPipeError:
            data = data[:0]
    if not data:
        selector.unregister(stdin)
        stdin.close()
    return data


def stop_reason(out: Output) -> str:
    """The same text each time: it does not tell how much time was left."""
    return f"it printed more than {out.most} bytes" if out.is_over else TOO_LONG


def start(command: list[str], **streams: Any) -> Any:
    """Starts what the policy runs, in a session of its own."""
    how: Any = {"stdout": PIPE, "start_new_session": True, "preexec_fn": be_killed_first, **streams}
    return Popen(command, **how)  # noqa: S603 - this is what the sandbox is for


def be_killed_first() -> None:
    """Where memory runs out, the kernel ends what was run, rather than this process."""
    LIBC.prctl(DUMPABLE, 1, 0, 0, 0)
    set_oom_score(900)


def set_oom_score(score: int) -> None:
    """How readily the kernel ends this process where memory runs out."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(score))


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of it."""
    while data:
        data = data[os.write(descriptor, data) :]


def kill_all(spared: set[int]) -> None:
    """Kills all but those spared, until there are no others; where they multiply faster than that, all at once."""
    for _ in range(KILL_ROUNDS):
        if not (left := set(running()) - spared):
            return
        signal_all(left, signal.SIGKILL)
        time.sleep(0.002)
    with suppress(OSError):
        os.kill(-1, signal.SIGKILL)


def signal_all(processes: set[int], number: int) -> None:
    """Sends a signal to processes that may have ended by now."""
    check_is_inside()
    for process in processes:
        with suppress(OSError):
            os.kill(process, number)


def check_is_inside() -> None:
    """Ends this process if it is in no sandbox, rather than all others of the machine."""
    if os.getpid() > FIRST_PROCESSES:
        sys.exit()


def running() -> Iterator[int]:
    """The processes of the sandbox, without this one and the first: no others are seen in its `/proc`."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The name of the program stands in parentheses, and may have any character.
                if file.read().rpartition(b")")[2].split()[0] != b"Z":
                    yield int(name)


def reap_for_child() -> None:
    """Goes on in a child, with which the first process of a sandbox ends, if that is this one. The kernel reaps what
    others leave, so that it uses no processor time, for which it could be ended."""
    if os.getpid() != 1:
        return
    # The kernel drops what a first process does not handle; with Python's handler, a signal from inside would end it.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGINT, handler)
        set_oom_score(100)  # The first process is to tell of it.
        return
    LIBC.prctl(DUMPABLE, 0, 0, 0, 0)
    close_streams()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with suppress(ChildProcessError):
        os.waitpid(child, 0)
    os._exit(ENDED_INSIDE)


def close_streams() -> None:
    """Standard input and output lead nowhere."""
    with open(os.devnull, "r+b", 0) as null:
        for stream in (0, 1, 2):
            os.dup2(null.fileno(), stream)


def serve() -> None:
    """Answers requests until standard input ends."""
    LIBC.prctl(DUMPABLE, 0, 0, 0, 0)  # Else programs could answer in its place, by its pipes and memory in `/proc`.
    is_first = os.getpid() == 1
    reap_for_child()
    wire, server = Wire.claim(keeps_output=False), Server()
    close_streams()
    wire.send(0, json.dumps({"is_first": is_first}).encode())
    answer_requests(wire, server.answer)
