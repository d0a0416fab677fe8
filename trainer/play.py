"""One rollout: the policy writes, somebody answers, until there is a reason to stop. What was written is a ledger."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, NoReturn, Protocol

import anyio

from gateway.errors import GatewayError
from gateway.session import AnyGateway, AnySession
from gateway.types import Context, Outcome, ToolSpec
from trainer.config import RolloutLimits
from trainer.engine.base import Engine, EngineError, Sampling, Written
from trainer.ledger import NOTHING, Author, Entry, Ledger
from trainer.parse.base import Reply
from trainer.run.rollout import Rollout, StopReason
from trainer.steps import OF_CALLS, Step, Stepper, ToolsAndFeedback, Turn, settled
from trainer.task import Task
from trainer.template import Cause, Template, drifts

log = logging.getLogger(__name__)


class Watch(Protocol):
    """Who is told what happens; told, never asked."""

    def state(self, key: str, state: str) -> None: ...

    def wrote(self, key: str, written: Written, asked: int) -> None: ...

    def answered(self, key: str, step: Step, seconds: float) -> None: ...

    def ended(self, key: str, rollout: Rollout) -> None: ...


class Unwatched:
    def state(self, key: str, state: str) -> None: ...

    def wrote(self, key: str, written: Written, asked: int) -> None: ...

    def answered(self, key: str, step: Step, seconds: float) -> None: ...

    def ended(self, key: str, rollout: Rollout) -> None: ...


Place = AbstractAsyncContextManager[Any]


@dataclass(frozen=True)
class Player:
    """Everything that rollouts share."""

    engine: Engine
    template: Template
    gateway: AnyGateway
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    sampling: Sampling = field(default_factory=Sampling)
    stepper: Stepper = field(default_factory=ToolsAndFeedback)
    watch: Watch = field(default_factory=Unwatched)
    seed: int = 0
    """Of the run: with it and the same weights, every rollout is written again as it was."""
    shown: set[Cause] = field(default_factory=set)
    """The causes of drift that an example was shown of."""

    async def play(
        self, task: Task, *, group: str = "", index: int = 0, attempt: int = 0, place: Place | None = None
    ) -> Rollout:
        """Never raises for what happens in a rollout: each ending has a reason. `place` is held while writing."""
        key = f"{group}/{task.id}/{index}" + (f".{attempt}" if attempt else "")
        return await _Rollout(self, task, group, index, key, place or nullcontext()).play()


class _Stop(Exception):
    """The rollout ends, from wherever it stands."""

    def __init__(self, why: StopReason, reason: str = "") -> None:
        super().__init__(reason)
        self.why, self.reason = why, reason


class _Rollout:
    def __init__(self, player: Player, task: Task, group: str, index: int, key: str, place: Place) -> None:
        self.player, self.task, self.group, self.index, self.key = player, task, group, index, key
        self.place = place
        self.ledger = Ledger()
        self.counts = {"turns": 0, "user_turns": 0, "calls": 0, "invalid": 0}
        self.timing: dict[str, float] = {}
        self.infos: dict[str, Any] = {}
        self.rewards: Mapping[str, float] = NOTHING
        self.earlier: list[Ledger] = []
        self.unfinished: tuple[int, ...] = ()
        """Of a turn that a plug-in went into, what stands before the policy's next words."""

    async def play(self) -> Rollout:
        why, reason = StopReason.WALL_TIME, f"not over within {self.player.limits.wall_s:g} s"
        with anyio.move_on_after(self.player.limits.wall_s):
            why, reason = await self._ending()
        rewards = NOTHING if why.infrastructure else self.rewards
        rollout = Rollout(
            task=self.task.id,
            ledger=self.ledger,
            stop=why,
            group=self.group,
            index=self.index,
            rewards=rewards,
            reason=reason,
            timing=self.timing,
            infos=self.infos,
            earlier=tuple(self.earlier),
        )
        self.player.watch.ended(self.key, rollout)
        return rollout

    async def _ending(self) -> tuple[StopReason, str]:
        """Runs until a reason to stop; what goes wrong around the policy is one too."""
        try:
            async with self.player.gateway.open(replace(self.task.asked, rollout=self.key)) as session:
                stop = await self._turns(session)
                await self._last_rewards(session)
                self._tell_drifts(session.specs)
                return stop.why, stop.reason
        except EngineError as error:
            return StopReason.ENGINE_FAILED, str(error)
        except GatewayError as error:
            return StopReason.TOOL_FAILED, str(error)
        except Exception as error:  # boundary: a plug-in or a template may raise anything; the other rollouts go on
            log.exception("rollout %s failed", self.key)
            return StopReason.ERROR, f"{type(error).__name__}: {error}"

    async def _turns(self, session: AnySession) -> _Stop:
        try:
            await self._take_turns(session)
        except _Stop as stop:
            return stop

    async def _take_turns(self, session: AnySession) -> NoReturn:
        self.player.watch.state(self.key, "pending")
        ids = self.player.template.open(self.task.messages, session.specs)
        self.ledger += Entry(Author.TASK, ids, tuple(self.task.messages), source=self.task.place)
        while True:
            reply, ended = await self._write()
            turn = Turn(self.task, self.counts["turns"], reply, self.ledger.messages, self.ledger, session, Context())
            finished = await settled(self.player.stepper.check_finished(turn))
            if finished:
                raise _Stop(finished if isinstance(finished, StopReason) else StopReason.STEP_DONE)
            self._may_go_on(reply)
            self._append(await self._step(turn), ended, session.specs)

    async def _write(self) -> tuple[Reply, bool]:
        """One turn of the policy, and whether it ended it itself."""
        limits, asked = self.player.limits, len(self.ledger)
        room = self._room - asked
        if room <= 0:
            raise _Stop(StopReason.LENGTH_ROLLOUT, f"{asked} tokens leave no room to write")
        sampling = replace(
            self.player.sampling,
            max_tokens=min(limits.turn_tokens, room),
            stop_ids=(*self.player.sampling.stop_ids, *self.player.template.stop_ids),
            seed=self._seed(),
        )
        written = await self._generated(sampling)
        self.player.watch.wrote(self.key, written, asked)
        self.counts["turns"] += 1
        reply = self._noted(written)
        if written.stop == "abort":
            raise _Stop(StopReason.CANCELLED, "the engine was told to stop")
        if written.stop == "length":
            whole = sampling.max_tokens == limits.turn_tokens
            raise _Stop(StopReason.LENGTH_TURN if whole else StopReason.LENGTH_ROLLOUT)
        return reply, self.player.template.ended(written.ids)

    async def _generated(self, sampling: Sampling) -> Written:
        """Waits for a place, and holds it only while the engine writes: who waits for a tool keeps nobody waiting."""
        self.player.watch.state(self.key, "pending")
        began = time.perf_counter()
        async with self.place:
            self._spent("queueing", began)
            self.player.watch.state(self.key, "generating")
            began = time.perf_counter()
            written = await self.player.engine.generate(
                self.ledger.ids, sampling, key=self.key, group=self.group, images=self.ledger.images
            )
        self._spent("generating", began)
        return written

    def _noted(self, written: Written) -> Reply:
        """The turn goes into the ledger before anyone judges it."""
        reply = self.player.template.read((*self.unfinished, *written.ids))
        named = tuple(
            replace(call, id=call.id or f"call_{self.counts['turns']}_{place}")
            for place, call in enumerate(reply.calls)
        )
        reply = replace(reply, calls=named)
        self.ledger += Entry(
            Author.POLICY,
            written.ids,
            (self.player.template.message(reply),),
            logprobs=written.logprobs,
            version=written.version,
            cached=written.cached,
            stop=written.stop,
            calls=reply.calls,
            info={"own": self.player.template.words(written.ids)} if self.unfinished else NOTHING,
        )
        return reply

    def _may_go_on(self, reply: Reply) -> None:
        """Limits are looked at before a call is made, so that no call is made and never answered."""
        limits, counts = self.player.limits, self.counts
        if counts["turns"] >= limits.assistant_turns:
            raise _Stop(StopReason.ASSISTANT_TURNS)
        if reply.calls and counts["calls"] + len(reply.calls) > limits.tool_calls:
            raise _Stop(StopReason.TOOL_CALLS)
        if not (reply.calls or reply.problems) and counts["user_turns"] >= limits.user_turns:
            raise _Stop(StopReason.USER_TURNS)

    async def _step(self, turn: Turn) -> Step:
        self.player.watch.state(self.key, "calling" if turn.reply.calls else "interacting")
        began = time.perf_counter()
        step: Step = await settled(self.player.stepper.step(turn))
        self._spent("calling" if step.author is Author.TOOL else "interacting", began)
        self.player.watch.answered(self.key, step, time.perf_counter() - began)
        self.infos.update((name, value) for name, value in step.info.items() if name != OF_CALLS)
        self.counts["calls"] += len(turn.reply.calls)
        self.counts["user_turns"] += step.author is Author.FEEDBACK and bool(step.messages)
        wrong = bool(step.outcomes) and all(outcome is Outcome.INVALID for outcome in step.outcomes)
        self.counts["invalid"] = self.counts["invalid"] + 1 if wrong else 0
        return step

    def _append(self, step: Step, ended: bool, specs: Sequence[ToolSpec]) -> None:
        """What was answered goes into the ledger; what nobody will read takes no tokens there."""
        why, reason = step.stop, step.reason
        ids: tuple[int, ...] = ()
        if why is None and self.counts["invalid"] >= self.player.limits.invalid_turns:
            why = StopReason.INVALID_CALLS
        if why is None:
            ids = self._next_ids(step, ended)
            if len(self.ledger) + len(ids) >= self._room:
                why, reason, ids = StopReason.LENGTH_ROLLOUT, f"an answer of {len(ids)} tokens does not fit", ()
        self.ledger += Entry(
            step.author,
            ids,
            step.messages,
            parts=step.parts,
            outcomes=step.outcomes,
            reward=step.reward,
            source=step.source,
            info=step.info,
        )
        if why is not None:
            raise _Stop(why, reason)
        if not step.insert:
            self._begin_anew(specs)

    def _next_ids(self, step: Step, ended: bool) -> tuple[int, ...]:
        if not step.insert:
            self.unfinished = ()
            return self.player.template.tail(step.messages, ended=ended)
        return self._inserted(step.insert, ended)

    def _inserted(self, text: str, ended: bool) -> tuple[int, ...]:
        """The turn goes on: its end, if it had one, is taken back, and its message is told once it is whole."""
        *before, turn = self.ledger.entries
        if ended:
            turn = replace(turn, ids=turn.ids[:-1], logprobs=(turn.logprobs or ())[:-1], stop=None)
        self.ledger = Ledger((*before, replace(turn, messages=())))
        ids = self.player.template.insert(text)
        self.unfinished += turn.ids + ids
        return ids

    def _begin_anew(self, specs: Sequence[ToolSpec]) -> None:
        """Where the template takes back what the policy wrote, the next turn sees a history that it did not write."""
        before = self.ledger
        shown = self.player.template.anew(before, specs)
        if shown is not None:
            media = tuple(medium for entry in before for medium in entry.media)
            self.earlier.append(before)
            self.ledger = Ledger((Entry(Author.TASK, shown, before.messages, parts=media, source=self.task.place),))

    def _tell_drifts(self, specs: Sequence[ToolSpec]) -> None:
        """What differs from the template's own rendering is counted by cause; of each, the first of a run is shown."""
        entries = list(self.ledger.entries)
        while entries and not entries[-1].ids:
            entries.pop()
        found = drifts(self.player.template, Ledger(tuple(entries)), specs)
        if found:
            self.infos["drift"] = dict(Counter(drift.cause for drift in found))
        for drift in found:
            known = drift.harmless or drift.cause in self.player.shown
            self.player.shown.add(drift.cause)
            log.log(logging.INFO if known else logging.WARNING, "rollout %s: %s", self.key, drift)

    @property
    def _room(self) -> int:
        """Tokens that the rollout may have in all."""
        context = self.player.engine.capabilities.context
        return min(self.player.limits.rollout_tokens, context) if context else self.player.limits.rollout_tokens

    def _seed(self) -> int:
        told = f"{self.player.seed}/{self.key}/{self.counts['turns']}"
        return int.from_bytes(sha256(told.encode()).digest()[:7], "big")

    def _spent(self, phase: str, began: float) -> None:
        self.timing[phase] = self.timing.get(phase, 0.0) + time.perf_counter() - began

    async def _last_rewards(self, session: AnySession) -> None:
        """What tools and the interaction gave, by kind; how they are weighed is for others to say."""
        await session.finish()
        rewards: dict[str, float] = {}
        for reward in session.rewards:
            rewards[reward.kind] = rewards.get(reward.kind, 0.0) + reward.value
        self.rewards = rewards
