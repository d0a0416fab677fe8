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
from anyio import to_thread

from gateway.errors import GatewayError
from gateway.session import AnyGateway, AnySession
from gateway.types import Context, Outcome, ToolSpec
from trainer.config import RolloutLimits
from trainer.engine.base import Engine, EngineError, Sampling, Written
from trainer.grown import Grown
from trainer.ledger import NOTHING, Author, Entry, Ledger, Message
from trainer.parse.base import Reply
from trainer.run.rollout import Rollout, Span, StopReason
from trainer.steps import OF_CALLS, Opening, Step, Stepper, ToolsAndFeedback, Turn, begun, settled
from trainer.task import KIND, Task
from trainer.template import Cause, Template, drifts
from trainer.template.laid import Laid, holds_media

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
    kind: str = KIND
    """The column that tells kinds of tasks apart."""

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
        self.grown = Grown(player.template)
        self.turn: Turn | None = None
        """What the policy wrote and nobody has answered."""
        self.counts = {"turns": 0, "user_turns": 0, "calls": 0, "invalid": 0}
        self.began = time.perf_counter()
        self.timing: dict[str, float] = {}
        self.timeline: list[Span] = []
        self.infos: dict[str, Any] = {}
        self.rewards: Mapping[str, float] = NOTHING

    @property
    def ledger(self) -> Ledger:
        return self.grown.ledger

    async def play(self) -> Rollout:
        why, reason = StopReason.WALL_TIME, f"not over within {self.player.limits.wall_s:g} s"
        with anyio.move_on_after(self.player.limits.wall_s):
            why, reason = await self._ending()
        rewards = NOTHING if why.infrastructure else self.rewards
        rollout = Rollout(
            task=self.task.id,
            kind=self.task.kind(self.player.kind),
            ledger=self.ledger,
            stop=why,
            group=self.group,
            index=self.index,
            rewards=rewards,
            reason=reason,
            timing=self.timing,
            timeline=tuple(self.timeline),
            infos=self.infos,
            earlier=tuple(self.grown.earlier),
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
        self.player.watch.state(self.key, "pending")
        player = self.player
        opening = Opening(self.key, self.task, session.specs, player.template, player.limits, player.sampling)
        async with begun(player.stepper, opening) as (first, stepper):
            try:
                await self._take_turns(session, first, stepper)
            except _Stop as stop:
                await self._close(stepper, stop.why)
                return stop

    async def _close(self, stepper: Any, why: StopReason) -> None:
        """A plug-in that followed the rollout has the last word on what is told of it, and learned from."""
        if hasattr(stepper, "over") and not why.infrastructure:
            left = await stepper.over(self.turn, why)
            self.infos.update(left.infos)
            self.grown.leave_out(left.left_out)

    async def _take_turns(self, session: AnySession, first: Step, stepper: Stepper) -> NoReturn:
        laid = await self._laid(first.history or ())
        ids = self.grown.next_ids(first, laid.messages, False, session.specs)
        entry = Entry(Author.TASK, ids, parts=laid.media, source=self.task.place)
        self.grown.add(self.player.template.placed(laid, entry))
        while True:
            reply, ended, cut = await self._write()
            messages = self.ledger.messages
            self.turn = turn = Turn(self.task, self.counts["turns"], reply, messages, self.ledger, session, Context())
            if cut is not None:
                raise cut
            finished = await settled(stepper.check_finished(turn))
            if finished:
                raise _Stop(finished if isinstance(finished, StopReason) else StopReason.STEP_DONE)
            self._may_go_on(reply)
            step = await self._step(stepper, turn)
            self.turn = None
            laid = await self._laid(step.messages if step.history is None else step.history)
            self._append(step, laid, ended, session.specs)

    async def _write(self) -> tuple[Reply, bool, _Stop | None]:
        """One turn of the policy, whether it ended it itself, and what cut it off."""
        limits, asked = self.player.limits, len(self.ledger.expanded)
        room = self._room - asked
        if room <= 0:
            raise _Stop(StopReason.LENGTH_ROLLOUT, f"{asked} tokens leave no room to write")
        sampling = replace(
            self.player.sampling,
            max_tokens=min(limits.turn_tokens, room),
            stop_ids=(*self.player.sampling.stop_ids, *self.player.template.stop_ids),
            barred=(*self.player.sampling.barred, *self.player.template.barred),
            seed=self._seed(),
        )
        written = await self._generated(sampling)
        if written.read not in (None, asked):
            told = f"the engine read {written.read} ids, where the ledger has {asked} with its images"
            raise _Stop(StopReason.MISALIGNED, told)
        self.player.watch.wrote(self.key, written, asked)
        self.counts["turns"] += 1
        reply = self._noted(written)
        if written.stop == "abort":
            raise _Stop(StopReason.CANCELLED, "the engine was told to stop")
        cut = None
        if written.stop == "length":
            whole = sampling.max_tokens == limits.turn_tokens
            cut = _Stop(StopReason.LENGTH_TURN if whole else StopReason.LENGTH_ROLLOUT)
        return reply, self.player.template.ended(written.ids), cut

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
        reply = self.player.template.read((*self.grown.unfinished, *written.ids))
        named = tuple(
            replace(call, id=call.id or f"call_{self.counts['turns']}_{place}")
            for place, call in enumerate(reply.calls)
        )
        reply = replace(reply, calls=named)
        own = {"own": self.player.template.words(written.ids)} if self.grown.unfinished else NOTHING
        entry = Entry(
            Author.POLICY,
            written.ids,
            (self.player.template.message(reply),),
            logprobs=written.logprobs,
            version=written.version,
            before=written.before,
            cached=written.cached,
            stop=written.stop,
            calls=reply.calls,
            info=own,
        )
        self.grown.add(entry)
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

    async def _step(self, stepper: Stepper, turn: Turn) -> Step:
        self.player.watch.state(self.key, "calling" if turn.reply.calls else "interacting")
        began = time.perf_counter()
        step: Step = await settled(stepper.step(turn))
        self._spent("calling" if step.author is Author.TOOL else "interacting", began)
        self.player.watch.answered(self.key, step, time.perf_counter() - began)
        self.infos.update((name, value) for name, value in step.info.items() if name != OF_CALLS)
        self.counts["calls"] += len(turn.reply.calls)
        self.counts["user_turns"] += step.author is Author.FEEDBACK and bool(step.messages)
        wrong = bool(step.outcomes) and all(outcome is Outcome.INVALID for outcome in step.outcomes)
        self.counts["invalid"] = self.counts["invalid"] + 1 if wrong else 0
        return step

    async def _laid(self, messages: Sequence[Message]) -> Laid:
        """What the template is told of messages; looking at pictures is work for a thread."""
        if not holds_media(messages):
            return Laid(tuple(messages))
        return await to_thread.run_sync(self.player.template.lay, messages)

    def _append(self, step: Step, laid: Laid, ended: bool, specs: Sequence[ToolSpec]) -> None:
        """What was answered goes into the ledger; what nobody will read takes no tokens there."""
        why, reason = step.stop, step.reason
        ids: tuple[int, ...] = ()
        if why is None and self.counts["invalid"] >= self.player.limits.invalid_turns:
            why = StopReason.INVALID_CALLS
        if why is None:
            ids = self.grown.next_ids(step, laid.messages, ended, specs)
            wide = len(ids) + sum(width - 1 for width in laid.widths if width)
            if len(self.ledger.expanded) + wide >= self._room:
                why, reason, ids = StopReason.LENGTH_ROLLOUT, f"an answer of {wide} tokens does not fit", ()
        entry = Entry(
            step.author if step.history is None else Author.TASK,
            ids,
            parts=step.parts,
            outcomes=step.outcomes,
            reward=step.reward,
            source=step.source,
            info=step.info,
        )
        self.grown.add(self.player.template.placed(laid, entry))
        if why is not None:
            raise _Stop(why, reason)
        if not step.insert and step.keep is None and step.history is None:
            self.grown.begin_anew(specs, self.task.place)

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
        spent = time.perf_counter() - began
        self.timing[phase] = self.timing.get(phase, 0.0) + spent
        self.timeline.append(Span(phase, round(began - self.began, 6), round(spent, 6)))

    async def _last_rewards(self, session: AnySession) -> None:
        """What tools and the interaction gave, by kind; how they are weighed is for others to say."""
        await session.finish()
        rewards: dict[str, float] = {}
        for reward in session.rewards:
            rewards[reward.kind] = rewards.get(reward.kind, 0.0) + reward.value
        self.rewards = rewards
