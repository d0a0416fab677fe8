"""Checks of arguments that never hold the event loop: quick ones on it, others in a child process with a limit.

The validator holds the interpreter while it works, so that a thread would stop the event loop as well. What counts
against the policy is processor time: on a busy machine a check may wait for as long as its call may take.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from gateway.bounded_json import loads
from gateway.limits import CallScope
from gateway.schema import ArgumentChecker, SchemaError, SlowCheckError
from gateway.types import Outcome, Text

if TYPE_CHECKING:
    from gateway.native.process_pool import ProcessPool

MAX_LENGTH = 1_048_576
"""Longer arguments are refused unread."""
MAX_VALUES = 50_000
"""Arguments with more values are refused."""
CHECK_CPU_S = 3.0
"""Processor time that a check in a child process may take; the deadline of the call applies as well."""
MAX_PROCESSES = 2


class CheckTimeoutError(Exception):
    """A check that had not ended when the call had to; its text is for the policy."""


class ArgumentChecks:
    """The checks of one gateway, with the child processes for slow ones, which start when needed."""

    def __init__(self) -> None:
        self._slots = anyio.Semaphore(MAX_PROCESSES)
        self._processes: ProcessPool | None = None

    async def close(self) -> None:
        """Ends the child processes."""
        if self._processes is not None:
            await self._processes.close()

    def _find_pool(self) -> ProcessPool:
        """The child processes; most runs never need any, nor what starts them."""
        if self._processes is None:
            from gateway.native.function import FunctionPath
            from gateway.native.process_pool import ProcessPool

            function = FunctionPath(f"{__name__}:explain_in_child")
            self._processes = ProcessPool(function, "argument check", max_processes=MAX_PROCESSES)
        return self._processes

    async def explain_error(
        self, checker: ArgumentChecker, arguments: str, scope: CallScope, call_timeout_s: Callable[[], float]
    ) -> str | None:
        """A message for the policy about what is wrong with its arguments; None if they are valid.

        `call_timeout_s` gives what the whole call may take, for checks that are not done at once; they raise
        CheckTimeoutError then, and when the call is cancelled.
        """
        try:
            return checker.explain_quickly(arguments)
        except SlowCheckError:
            return await self._explain_slowly(checker, arguments, scope, call_timeout_s())

    async def _explain_slowly(
        self, checker: ArgumentChecker, arguments: str, scope: CallScope, call_timeout_s: float
    ) -> str | None:
        if len(arguments) > MAX_LENGTH:
            return f"The arguments have {len(arguments)} characters, more than {MAX_LENGTH}. Write shorter ones."
        with scope.open(call_timeout_s):
            async with self._slots:
                request = {"parameters": json.dumps(checker.parameters), "arguments": arguments}
                result = await self._find_pool().call(request)
            if result.outcome is Outcome.OK:
                return "".join(part.text for part in result.parts if isinstance(part, Text)) or None
            if result.outcome is Outcome.UNKNOWN:
                return f"The arguments cannot be checked in {CHECK_CPU_S:g} s of processor time. Write simpler ones."
            return f"The arguments cannot be checked ({result.reason}). Write simpler ones."
        raise CheckTimeoutError(f"The arguments were not checked within {call_timeout_s:g} s. Write simpler ones.")


def explain_in_child(parameters: str, arguments: str) -> str:
    """What is wrong with arguments, in a child process; empty if nothing is. Too long a check ends the process."""
    signal.setitimer(signal.ITIMER_PROF, CHECK_CPU_S)
    try:
        loads(arguments or "{}", MAX_VALUES)
        return ArgumentChecker(json.loads(parameters)).explain_error(arguments) or ""
    except SchemaError as error:
        return f"The arguments cannot be checked: {error}."
    except ValueError as error:
        return f"The arguments are not usable JSON ({error}). Write one simpler JSON object."
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
