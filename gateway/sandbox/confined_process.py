"""A confined process that answers messages. When it ends, it is known whether what runs in it has ended it."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import Self

import anyio

from gateway.errors import Unavailable
from gateway.limits import count_tool_time
from gateway.process.pipe_process import PipeProcess, ProcessEnded
from gateway.process.reaper import Reaper
from gateway.sandbox import sandbox_statistics as statistics
from gateway.sandbox.sandboxed_command import SIGNAL_CODES, SandboxedCommand
from gateway.types import Outcome, ToolResult

START_S = 30.0
ANSWER_MARGIN_S, ANSWER_MARGIN_SHARE = 1.5, 0.15
"""Time that is left of a call for ending its sandbox, in seconds and as a share of the call."""
NO_MEMORY = "the sandbox was ended from outside: the machine has no memory left"
LATE_START = "the call reached its time limit, most of which was over when its sandbox was ready"


class SandboxEnded(Exception):
    """What ran in a sandbox ended it, or reached a limit that ends it."""


class SandboxLate(SandboxEnded):
    """What ran in a sandbox did not answer in time, so that it was ended."""

    def __init__(self) -> None:
        super().__init__("it did not answer in time")


class SandboxKilled(Exception):
    """A sandbox was ended from outside: what it had done by then is not known, and nobody's fault in it."""


def answer_time_s() -> float:
    """How long a request may take: a little less than its call, so that a late answer is the policy's error."""
    left_s = anyio.current_effective_deadline() - anyio.current_time()
    return max(0.05, left_s - min(ANSWER_MARGIN_S, ANSWER_MARGIN_SHARE * left_s))


def excuse_late_start(result: ToolResult, started_at: float) -> ToolResult:
    """The result of a call that reached its time limit in a sandbox that was ready at `started_at`: no error of the
    policy where most of the time was over by then."""
    if count_tool_time(time.monotonic() - started_at):
        return result
    return replace(result, outcome=Outcome.TIMEOUT, reason=LATE_START)


class ConfinedProcess:
    """A process that sends one message when it is ready, and then one for each that it gets."""

    def __init__(self, process: PipeProcess, held: SandboxedCommand) -> None:
        self.process, self.settings, self.group, self._held = process, held.settings, held.group, held
        self.failure_codes = held.failure_codes
        self.ready = b""
        """What it sent when it was ready."""
        self._stack = AsyncExitStack()
        self._lock = anyio.Lock()
        self._is_stopped = False
        self._memory_hits = 0
        """Those that were known at its last answer: a limit that was hit before does not explain a later end."""
        self._killed = ""
        """How it was ended from outside, if it was."""

    @classmethod
    async def start(
        cls, command: AbstractAsyncContextManager[SandboxedCommand], reaper: Reaper, within_s: float = START_S
    ) -> Self:
        """Starts the command, which ends with this process, and waits until it is ready; raises Unavailable."""
        began = time.perf_counter()
        try:
            async with AsyncExitStack() as stack:
                held = await stack.enter_async_context(command)
                started = cls(PipeProcess.start(held.line), held)
                stack.push_async_callback(started.process.kill)
                reaper.add(started.process.pid)
                stack.callback(reaper.remove, started.process.pid)
                await started._wait_until_ready(within_s)
                started._stack = stack.pop_all()
        except OSError as error:  # No descriptors, processes or memory are left on this machine.
            statistics.STATISTICS.refusals += 1
            raise Unavailable(f"a sandbox did not start: {error}") from error
        statistics.count_start(time.perf_counter() - began)
        return started

    @property
    def alive(self) -> bool:
        """Whether it takes requests. Of one that has ended by itself, the next request tells why."""
        return not self._is_stopped

    def take_refusals(self) -> tuple[str, ...]:
        """The connections that its proxy refused since the last time."""
        return self._held.take_refusals()

    async def _wait_until_ready(self, within_s: float) -> None:
        try:
            with anyio.fail_after(within_s):
                _, self.ready = await self.process.receive()
        except ProcessEnded as error:
            statistics.STATISTICS.refusals += 1
            await self.process.wait()
            raise Unavailable(f"a sandbox did not start: {self.process.error_text or error}") from error
        except TimeoutError:
            statistics.STATISTICS.refusals += 1
            raise Unavailable(f"a sandbox did not start within {within_s:g} s") from None

    async def ask(self, message: bytes, timeout_s: float) -> bytes:
        """Sends a message and waits for the answer. One that is late or cancelled ends the sandbox: nobody would know
        what it left. Raises SandboxEnded, or SandboxKilled if the sandbox was ended from outside."""
        async with self._lock:
            if self._is_stopped or self.process.exit_code is not None:
                raise SandboxEnded(await self._end_reason())
            try:
                with anyio.fail_after(timeout_s):
                    answer = await self.process.ask(message)
                await self._check_memory()
                self._memory_hits = self.group.hits()["memory"]
                return answer
            except ProcessEnded as error:
                raise SandboxEnded(await self._end_reason()) from error
            except TimeoutError:
                await self.stop()
                raise SandboxEnded(f"it did not answer within {timeout_s:g} s") from None
            except BaseException:
                await self.stop()
                raise

    async def check_not_killed(self) -> None:
        """Raises SandboxKilled if it was ended from outside, or processes in it were."""
        if not self._is_stopped:
            await self._check_memory()
        if self.process.exit_code is not None:
            await self._end_reason()

    async def _check_memory(self) -> None:
        if self.group.ran_out_of_memory:
            self._killed = NO_MEMORY
            await self.stop()
            raise SandboxKilled(self._killed)

    async def _end_reason(self) -> str:
        """Why the sandbox ended. What runs inside cannot signal the process outside: then something else did."""
        if not self._is_stopped:
            code = await self.process.wait(1.0)
            await self._check_memory()
            limit, text = self._held.find_limit(self._memory_hits), self.process.error_text
            await self.stop()
            if limit:
                return limit
            self._killed = self._describe_kill(code, text)
            if not self._killed:
                return f"its processes ended it{f': {text}' if text else ''}"
        if self._killed:
            raise SandboxKilled(self._killed)
        return "its processes ended it"

    def _describe_kill(self, code: int | None, text: str) -> str:
        """How it was ended from outside, by its exit code; empty if it was not."""
        if code is None or (code >= 0 and code not in self.failure_codes):
            return ""
        if code < 0 or code > SIGNAL_CODES:
            return f"the sandbox was ended from outside, by signal {-code if code < 0 else code - SIGNAL_CODES}"
        return f"what runs the sandbox failed: {text or f'it ended with status {code}'}"

    async def stop(self) -> None:
        """Ends everything in the sandbox, and removes what it held."""
        if not self._is_stopped:
            self._is_stopped = True
            statistics.count_end()
            with anyio.CancelScope(shield=True):
                await self._stack.aclose()
