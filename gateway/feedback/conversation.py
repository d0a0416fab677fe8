"""One interaction, one rollout: started once, asked turn by turn, finalized once however it ends."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import anyio

from gateway.errors import SessionError
from gateway.feedback.answer import addressed, ask, told, unheard
from gateway.feedback.base import BaseInteraction
from gateway.media.admit import LOST, Admission
from gateway.media.take import is_heavy, take
from gateway.native.thread import Threads
from gateway.types import Feedback, Outcome

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Patience with a turn that still runs at the end, and then with `finalize_interaction`."""

Counts = Counter[tuple[str, str]]
"""How often (interaction, what) happened: an outcome's name, or a failure to start, finalize or close."""


class Conversation:
    """Turns are taken one after another. Holds no cancel scope between them, so any task may close it."""

    def __init__(
        self,
        name: str,
        interaction: BaseInteraction,
        timeout_s: float,
        admit: Admission,
        threads: Threads,
        counts: Counts,
    ) -> None:
        self.name, self.interaction, self.timeout_s = name, interaction, timeout_s
        self._admit = admit
        self._threads, self._counts = threads, counts
        self._id = str(uuid4())
        self._args: Mapping[str, Any] = {}
        self._turns = anyio.Lock()
        self._begun = self._started = self._closed = False

    async def open(self, args: Mapping[str, Any]) -> None:
        """Starts at once; an interaction that cannot start refuses the session."""
        self._args = args
        with anyio.move_on_after(self.timeout_s):
            try:
                await self._start()
                return
            except Exception as error:  # boundary: the operator's code may raise anything
                raise SessionError(f"interaction {self.name!r} could not start: {told(error)}") from error
        raise SessionError(f"interaction {self.name!r} did not start within {self.timeout_s} s")

    async def turn(self, messages: Sequence[Mapping[str, Any]]) -> Feedback:
        feedback = unheard(self.name, Outcome.TIMEOUT, f"{self.name!r} gave no feedback within {self.timeout_s} s")
        with anyio.move_on_after(self.timeout_s):
            try:
                async with self._turns:
                    feedback = await self._heard([dict(message) for message in messages])
            except TimeoutError as error:
                feedback = unheard(self.name, Outcome.TIMEOUT, told(error))
            except Exception as error:  # boundary: the operator's code failed, and the policy is not to blame
                log.warning("interaction %r failed: %s", self.name, told(error))
                feedback = unheard(self.name, Outcome.UNAVAILABLE, told(error))
        self._counts[self.name, feedback.outcome.value] += 1
        return feedback

    async def close(self) -> None:
        """Finalizes if `start_interaction` was called, even where it failed half-way: it may hold something by then."""
        if self._closed:
            return
        self._closed = True
        if not self._begun:
            return
        with anyio.move_on_after(CLOSE_S, shield=True):
            async with self._turns:
                pass
        with anyio.move_on_after(CLOSE_S, shield=True) as scope:
            await self._finalize()
        if scope.cancelled_caught:
            self._counts[self.name, "finalize_failed"] += 1
            log.error("interaction %r was not finalized within %s s", self.name, CLOSE_S)

    async def _start(self) -> None:
        if self._closed:
            raise SessionError("the session is closed")
        if self._begun and not self._started:
            raise SessionError(f"interaction {self.name!r} failed to start before")
        if self._begun:
            return
        self._begun = True
        start = self.interaction.start_interaction
        # verl keeps the name among the arguments; only who asks for it by name is given it here.
        named = {"name": self.name} if "name" in inspect.signature(start).parameters else {}
        try:
            own_id = await self._threads.run(start, self._id, **named, **self._args)
        except Exception:
            self._counts[self.name, "start_failed"] += 1
            raise
        self._id = own_id if isinstance(own_id, str) else self._id
        self._started = True

    async def _heard(self, messages: list[dict[str, Any]]) -> Feedback:
        await self._start()
        done, said, score, metadata = await ask(self.interaction, self._threads, self._id, messages, self._args)
        taken = await self._threads.run(take, said) if is_heavy(said) else take(said)
        parts, lost = await self._admit.parts(taken.parts)
        lost += taken.lost
        return Feedback(parts, score, done, {**metadata, LOST: lost} if lost else metadata)

    async def _finalize(self) -> None:
        try:
            finalize = self.interaction.finalize_interaction
            await self._threads.run(finalize, *addressed(finalize, self._id))
        except Exception as error:  # boundary: what cannot be forgotten must not keep the session from closing
            if not self._started:
                # It may well not know a rollout whose start failed.
                log.debug("finalizing %r after a failed start: %s", self.name, told(error))
                return
            self._counts[self.name, "finalize_failed"] += 1
            log.exception("interaction %r could not be finalized", self.name)
