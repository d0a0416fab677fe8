"""Late answers of a server in a sandbox of its rollout: whose fault they are.

The policy has called the server, and may have hung it. It is not to blame where the call's time went into a queue or
the start of the sandbox, or where the server waited for something outside: for a host to be reached, or for an answer
to its own question.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from gateway.limits import FAIR_SHARE, count_tool_time
from gateway.mcp_client.errors import PendingRequest, UpstreamError
from gateway.sandbox.confined_process import answer_time_s
from gateway.sandbox.outside_waits import OutsideWaits
from gateway.sandbox.sandboxed_command import SandboxedCommand
from gateway.types import Outcome

POLICY_TEXT = "The tool did not answer in time."


class LateAnswers:
    """What is known of a server's waits and of how late it was."""

    def __init__(self) -> None:
        self.questions = OutsideWaits()
        """Its waits for answers to its own questions."""
        self._sandbox: SandboxedCommand | None = None
        self._was_excused = False

    @contextmanager
    def request(self, pending: PendingRequest, sandbox: SandboxedCommand) -> Iterator[None]:
        """A block that sends a request and waits for its answer: the server has that time of the call.

        It has a little less time than the call, so that a late answer is told.
        """
        self._sandbox, self._was_excused, pending.began_at = sandbox, False, time.monotonic()
        try:
            with anyio.move_on_after(answer_time_s()):
                yield
        finally:
            pending.had_fair_share = self._count(pending.began_at)

    def _count(self, began_at: float) -> bool:
        """Counts the server's time since then; whether it has had its share."""
        elapsed_s = time.monotonic() - began_at
        own_s = elapsed_s - sum(waits.seconds_since(began_at) for waits in self._waits())
        return count_tool_time(own_s) and own_s >= FAIR_SHARE * elapsed_s

    def _waits(self) -> Iterator[OutsideWaits]:
        yield self.questions
        if self._sandbox is not None and self._sandbox.waits is not None:
            yield self._sandbox.waits

    def late_error(self, pending: PendingRequest) -> UpstreamError:
        """The error of a call that was not answered in time."""
        self._was_excused = not pending.had_fair_share
        if pending.sent and pending.had_fair_share:
            text = "The server of this tool did not answer in time."
            return UpstreamError(Outcome.ERROR, "no answer in time from what runs in the sandbox", policy_text=text)
        if not pending.sent:
            reason = "no answer in time: the request could not be written"
        elif any(waits.seconds_since(pending.began_at) for waits in self._waits()):
            reason = "no answer in time from a server that waits for something outside of its sandbox"
        else:
            reason = "no answer in time: most of the call's time was over when the server got it"
        return UpstreamError(Outcome.TIMEOUT, reason, policy_text=POLICY_TEXT)

    @property
    def excuses_hang(self) -> bool:
        """Whether a server that answers no ping may wait for something outside, or be busy with what it got late."""
        return self._was_excused or any(waits.is_slow for waits in self._waits())
