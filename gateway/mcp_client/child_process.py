"""Stdio MCP servers as child processes, whose messages go to and come from a dispatcher.

Stopping a server ends all its processes in bounded time. The tail of its standard error is kept for messages.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from subprocess import PIPE

import anyio
from mcp.client.stdio import get_default_environment
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from gateway.bounded_json import MAX_VALUES
from gateway.mcp_client.dispatcher import Dispatcher, RequestId
from gateway.mcp_client.errors import PendingRequest, current_request, record_cut
from gateway.mcp_client.flood_limits import (
    CHUNK_S,
    EVENT_S,
    LINE_COST,
    LINE_S,
    READ_S,
    CommentBudget,
    Pacer,
    StreamFlood,
    split_pieces,
)
from gateway.mcp_client.framing import LineSplitter, OversizedLine
from gateway.mcp_client.messages import (
    GUESS_BYTES,
    UnreadableMessageError,
    error_response,
    find_mistake,
    find_request_id,
    read_messages,
    serialize,
)
from gateway.mcp_client.server_status import ServerLog
from gateway.process.log_tail import LogTail
from gateway.process.pipe_process import (
    PIPE_ERRORS,
    ReadPipe,
    WritePipe,
    end_supervised,
    start_supervised,
    wait_for_exit,
)
from gateway.process.supervised_process import SupervisedProcess

_STDERR_TAIL_BYTES, _STDERR_TAIL_CHARS = 2400, 600
_BROKEN_EXCERPT_BYTES = 80
_STOP_S, _SILENT_STOP_S = 1.0, 0.2
"""Time for a server to stop; shorter while it has not sent a message yet and so has done nothing."""
_EXIT_POLL_S, _EXIT_CODE_S = 0.2, 0.5
_LAST_OUTPUT_S = 0.3
"""How long the output of a process that has exited is still read, where another process holds the pipe open."""
_WRITE_BATCH_BYTES = 65536
"""No further line is added to a write of more bytes than this."""
_MAX_WAITING_LINES, _MAX_WAITING_ANSWERS = 64, 1_000
_ANSWER = re.compile(rb'\s*(?:\[\s*)?\{\s*"(?:jsonrpc|id|result|error)"\s*:')
_METHOD = re.compile(rb'"method"\s*:')
MAX_UNASSIGNED = 64

OutgoingLine = tuple[bytes, PendingRequest | None]


class OpenRequests:
    """Requests that were sent and not answered, and broken answers that may be for several of them.

    Lines that are no answers, such as a server's log, are left alone. An answer that nobody can assign ends no other
    call: it is held against those that were open then, until only one of them is left.
    """

    def __init__(self) -> None:
        self._open: set[RequestId] = set()
        self._broken: list[tuple[set[RequestId], str]] = []

    def note_sent(self, message: JSONRPCMessage) -> None:
        """Notes a message to the server: a request is open, one that is cancelled is not any more."""
        if isinstance(message, JSONRPCRequest):
            self._open.add(message.id)
        elif isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
            request_id = (message.params or {}).get("requestId")
            if isinstance(request_id, str | int):
                self._open.discard(request_id)

    def note_answered(self, message: JSONRPCMessage) -> None:
        """Notes a message of the server: a request that it answers is not open any more."""
        if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id is not None:
            self._open.discard(message.id)

    def note_broken(self, line: bytes, problem: str) -> None:
        """Notes a line that cannot be read, if it was meant as an answer."""
        is_answer = _ANSWER.match(line) and not _METHOD.search(line, 0, GUESS_BYTES)
        if is_answer and self._open and len(self._broken) < MAX_UNASSIGNED:
            self._broken.append((set(self._open), problem))

    def take_lost(self) -> Iterator[tuple[RequestId, str]]:
        """The requests whose answers were broken, with the problem: those left when as many answers were broken."""
        if not self._broken:
            return
        self._broken = [(rest, problem) for ids, problem in self._broken if (rest := ids & self._open)]
        candidates = {request_id for ids, _ in self._broken for request_id in ids}
        if not candidates or len(self._broken) < len(candidates):
            return
        problems = [problem for _, problem in self._broken]
        self._broken.clear()
        self._open -= candidates
        yield from zip(sorted(candidates, key=str), problems, strict=False)


class ChildProcess:
    """A stdio MCP server as a child process."""

    def __init__(
        self,
        command: tuple[str, ...],
        *,
        name: str,
        env: Mapping[str, str],
        cwd: Path | None,
        max_bytes: int,
    ) -> None:
        self.name, self.requests = name, OpenRequests()
        self.command, self.cwd = command, cwd
        self.max_bytes, self.max_values = max_bytes, MAX_VALUES
        self.env = get_default_environment() | dict(env)
        self._process: SupervisedProcess | None = None
        self.stop_timeout_s = _SILENT_STOP_S
        """How long to wait after closing stdin, and again after SIGTERM."""
        self.stray_line_count, self.first_stray_line = 0, ""
        self.overflow: str | None = None
        self._has_spoken, self.log = False, ServerLog()
        self._stderr_tail = LogTail(_STDERR_TAIL_BYTES)
        self._strays = CommentBudget()
        self._reading = anyio.CancelScope()

    @property
    def pid(self) -> int | None:
        """The server's own process id."""
        return self._process.pid if self._process is not None else None

    @property
    def exit_code(self) -> int | None:
        """The server's exit code; negative for a signal, None while it runs."""
        return self._process.exit_code if self._process is not None else None

    @asynccontextmanager
    async def open(self, dispatcher: Dispatcher) -> AsyncIterator[None]:
        """Starts the server for the length of the block, with `dispatcher` at its other end."""
        process = self._process = await start_supervised(
            self.command, env=self.env, cwd=self.cwd, stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        pipes = process.supervisor
        stdin, stdout, stderr = WritePipe(pipes.stdin), ReadPipe(pipes.stdout), ReadPipe(pipes.stderr)
        self.log.note(f"process {process.pid} started")
        is_ended = False
        dispatcher.outbox = writer = StdinWriter(self.requests)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read_stdout, stdout, dispatcher)
                tasks.start_soon(writer.run, stdin)
                tasks.start_soon(self._read_stderr, stderr)
                tasks.start_soon(self._end_after_exit, process)
                try:
                    yield
                finally:
                    # As the MCP specification asks: closes stdin, then sends SIGTERM, then kills.
                    stdin.close()
                    await end_supervised(process, self.stop_timeout_s)
                    is_ended = True
                    tasks.cancel_scope.cancel()
        finally:
            if not is_ended:
                await end_supervised(process, 0.0)

    async def _read_stdout(self, stdout: ReadPipe, dispatcher: Dispatcher) -> None:
        """Reads messages until the pipe ends or overflows, then only drains the pipe."""
        with suppress(*PIPE_ERRORS), self._reading:
            await self._read_messages(stdout, dispatcher)
        dispatcher.end()
        pacer = Pacer()
        with suppress(*PIPE_ERRORS):
            while await stdout.receive():
                await pacer.work(READ_S)

    async def _read_messages(self, stdout: ReadPipe, dispatcher: Dispatcher) -> None:
        lines, pacer = LineSplitter(self.max_bytes), Pacer()
        try:
            while self.overflow is None and (chunk := await stdout.receive()):
                dispatcher.is_reading = True
                await pacer.work(CHUNK_S)
                for piece in split_pieces(chunk):
                    for line in lines.feed(piece):
                        if line:
                            await self._handle_line(line, dispatcher, pacer)
                        else:
                            self._strays.spend(LINE_COST)
                            await pacer.work(LINE_S)
                dispatcher.is_reading = False
        except StreamFlood as error:
            self.overflow = str(error)

    async def _end_after_exit(self, process: SupervisedProcess) -> None:
        """Ends the reading when the process has exited: a process that it left behind may hold the pipe for ever."""
        while process.exit_code is None:  # noqa: ASYNC110 (the process has no event of its own)
            await anyio.sleep(_EXIT_POLL_S)
        await anyio.sleep(_LAST_OUTPUT_S)
        self._reading.cancel()

    async def _handle_line(self, line: bytes | OversizedLine, dispatcher: Dispatcher, pacer: Pacer) -> None:
        if isinstance(line, OversizedLine):
            request_id = find_request_id(line.head, line.tail)
            text = f"the answer is too large: more than {self.max_bytes} bytes"
            if request_id is None:
                record_cut("line")
                self.overflow = f"the server wrote a line of more than {self.max_bytes} bytes"
            else:
                await dispatcher.receive(error_response(request_id, text))
            return
        try:
            parsed = await read_messages(line, self.max_values)
        except UnreadableMessageError as error:
            parsed = []
            problem = (
                f"{error}; server {self.name!r} wrote a line that begins {_excerpt(line, _BROKEN_EXCERPT_BYTES)!r}"
            )
            if error.request_id is not None:
                parsed = [error_response(error.request_id, problem)]
            else:
                self.requests.note_broken(line, problem)
        if not parsed:
            self._note_stray(line, dispatcher)
            await pacer.work(LINE_S)
        elif not self._has_spoken:
            self._has_spoken, self.stop_timeout_s = True, _STOP_S
        for message in parsed:
            self.requests.note_answered(message)
        lost = [error_response(request_id, problem) for request_id, problem in self.requests.take_lost()]
        for message in (*parsed, *lost):
            await pacer.work(EVENT_S)
            await dispatcher.receive(message)

    def _note_stray(self, line: bytes, dispatcher: Dispatcher) -> None:
        self._strays.spend(len(line) + LINE_COST)
        if line.strip():
            self.stray_line_count += 1
            self.first_stray_line = self.first_stray_line or _excerpt(line)
        if (mistake := find_mistake(line)) is not None:
            dispatcher.note_unreadable(mistake)

    async def _read_stderr(self, stderr: ReadPipe) -> None:
        """Keeps the tail of stderr; an undrained pipe would block a server that logs a lot."""
        pacer = Pacer()
        with suppress(*PIPE_ERRORS):
            while data := await stderr.receive():
                self.log.add(data)
                self._stderr_tail.add(data)
                await pacer.work(READ_S)

    async def describe_exit(self) -> str:
        """Why the process ended, after waiting a moment for its exit code."""
        process = self._process
        if process is None:
            return "it never started"
        await wait_for_exit(process.supervisor, _EXIT_CODE_S)
        reasons = [self.overflow] if self.overflow else []
        code = process.exit_code
        if code is not None:
            reasons.append(
                f"the process was ended by signal {-code}" if code < 0 else f"the process exited with {code}"
            )
        elif not reasons:
            reasons.append("the process closed its output")
        return "; ".join((*reasons, *self.output_notes()))

    def output_notes(self) -> tuple[str, ...]:
        """Notes on stray output lines and on the tail of stderr, where there is any."""
        notes = []
        if self.stray_line_count:
            count, first = self.stray_line_count, self.first_stray_line
            notes.append(f"{count} lines of output were not JSON-RPC, such as {first!r}")
        if stderr := self._stderr_tail.text:
            notes.append(f"its standard error ends: {stderr[-_STDERR_TAIL_CHARS:]}")
        return tuple(notes)


class StdinWriter:
    """The writing end. Lines are queued whole, so a cancelled call never leaves half a line in the pipe.

    Those that wait are written at once: a write to the pipe costs more than building a line. A memory stream would cost
    more than both. Answers to a server that asks without end and reads nothing are dropped.
    """

    def __init__(self, requests: OpenRequests) -> None:
        self._requests = requests
        self._lines: deque[OutgoingLine] = deque()
        self._has_lines = anyio.Event()
        self._room = anyio.Semaphore(_MAX_WAITING_LINES)
        self._waiting_answers = 0
        self._is_closed = False

    async def run(self, stdin: WritePipe) -> None:
        """Writes the lines until it is cancelled, or nobody reads them any more."""
        try:
            with suppress(*PIPE_ERRORS):
                while True:
                    await self._has_lines.wait()
                    await stdin.send(b"".join(self._take_batch()))
        finally:
            self._is_closed = True
            self._room.release()

    def _take_batch(self) -> Iterator[bytes]:
        size = 0
        while self._lines and size <= _WRITE_BATCH_BYTES:
            data, pending = self._lines.popleft()
            if pending is not None:
                pending.sent = True
            size += len(data)
            self._room.release()
            yield data
        if not self._lines:
            self._has_lines = anyio.Event()

    async def send(self, message: JSONRPCMessage, headers: Mapping[str, str]) -> None:
        self._requests.note_sent(message)
        line = (serialize(message) + b"\n", current_request.get())
        if isinstance(message, JSONRPCRequest):
            await self._put(line)
        elif not isinstance(message, JSONRPCNotification):
            if self._waiting_answers < _MAX_WAITING_ANSWERS:
                self._waiting_answers += 1
                try:
                    await self._put(line)
                finally:
                    self._waiting_answers -= 1
        elif message.method != "notifications/cancelled" or self._room.value:
            # A server that stopped reading will not hear of a cancellation, and its caller's deadline has passed.
            await self._put(line)

    async def _put(self, line: OutgoingLine) -> None:
        """Queues a line; waits only where there is no room. Each line that is taken wakes one sender, in order."""
        try:
            self._room.acquire_nowait()
        except anyio.WouldBlock:
            await self._room.acquire()
        if self._is_closed:
            self._room.release()  # wakes the next
            raise anyio.BrokenResourceError
        self._lines.append(line)
        self._has_lines.set()


def _excerpt(line: bytes, max_bytes: int = 200) -> str:
    return line[:max_bytes].decode("utf-8", "replace").strip()
