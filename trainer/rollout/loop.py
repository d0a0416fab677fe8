"""The rollout loop: the policy generates, tools or an interaction answer, until there is a reason to stop."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, NoReturn

import anyio
from anyio import to_thread

from gateway.await_user_code import await_user_code
from gateway.errors import GatewayError, format_error
from gateway.session import AnyGateway, AnySession
from gateway.session_protocols import Reward
from gateway.types import EMPTY, Context, Outcome, ToolSpec
from gateway.user_code import UserCode
from trainer.engine.base import Capabilities, Engine, EngineError, Generation, Sampling
from trainer.ledger import BRANCH, OFFERED, Author, Entry, Ledger, Message
from trainer.parse.base import MAX_PROBLEMS, Reply
from trainer.rollout.ledger_builder import LedgerBuilder, as_context, make_policy_entry
from trainer.rollout.observer import NullObserver, RolloutObserver
from trainer.rollout.rollout import COUNTS_INFO, IGNORED_CALLS, STATES_INFO, Rollout, Span, StopReason
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.steppers import (
    CALLS_INFO,
    RolloutStart,
    RolloutStepper,
    Step,
    Stepper,
    ToolsAndFeedback,
    Turn,
    check_finished,
    open_stepper,
    take_step,
)
from trainer.rollout.task import Task
from trainer.template import Cause, Template, find_drifts
from trainer.template.media_layout import MediaLayout, has_media, join_text


def limit_calls(reply: Reply, limits: RolloutLimits, template: Template) -> Reply:
    """The reply with the calls that are made; each further one is a problem, and is not in the chat's message.

    The limit is that of the settings or the template's own, since a message with more calls than the template writes
    could not be rendered again. The policy's ids stay as they are.
    """
    if len(reply.calls) <= 1:
        return reply
    known = [limit for limit in (limits.parallel_calls, template.max_calls) if limit is not None]
    limit = min(known, default=len(reply.calls))
    left_out = [
        f"{call.name} was not called: a turn may have {limit} {'call' if limit == 1 else 'calls'} at most."
        " Call it in your next turn."
        for call in reply.calls[limit:]
    ]
    return replace(reply, calls=reply.calls[:limit], problems=(*reply.problems, *left_out)[:MAX_PROBLEMS])


SYSTEM_ROLES = ("system", "developer")


def add_instructions(messages: Sequence[Mapping[str, Any]], specs: Sequence[ToolSpec]) -> Sequence[Mapping[str, Any]]:
    """The messages with the instructions of the offered tools' servers after the system prompt, or as one."""
    first = messages[0] if messages else None
    known = str(first["content"]) if first is not None and first["role"] in SYSTEM_ROLES else ""
    texts = dict.fromkeys(spec.instructions for spec in specs if spec.instructions and spec.instructions not in known)
    if not texts:
        return messages
    text = "\n\n".join(texts)
    if first is None or first["role"] not in SYSTEM_ROLES:
        return ({"role": "system", "content": text}, *messages)
    content = first["content"]
    joined = f"{content}\n\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return ({**first, "content": joined}, *messages[1:])


def find_offered(specs: Sequence[ToolSpec], tools: Sequence[Mapping[str, Any]]) -> Sequence[ToolSpec]:
    """The gateway's tools that an agent offers the policy; agents put the name of their MCP client before a tool's."""
    names = [str(tool["function"]["name"]) for tool in tools]
    return [spec for spec in specs if any(_is_name_of(name, spec.name) for name in names)]


def _is_name_of(offered: str, name: str) -> bool:
    return re.search(rf"(?:^|[^A-Za-z0-9]){re.escape(name)}$", offered) is not None


SAME_SEED_ATTEMPTS = 1
"""A rollout that infrastructure failed begins again with its seeds: others would prefer rollouts that are short, or
call little. If that one fails too, which its calls may have caused, further ones have seeds of their own."""
log = logging.getLogger(__name__)


Slot = AbstractAsyncContextManager[Any]


def first_unrouted(ledger: Ledger, capabilities: Capabilities) -> int | None:
    """The first token whose experts are to be told; none with images, whose tokens the engine alone counts."""
    return ledger.routed_tokens if capabilities.tells_experts and not ledger.images else None


def sum_rewards(rewards: Iterable[Reward], infos: dict[str, Any]) -> dict[str, float]:
    """The rewards by kind. What they count beside that goes into the rollout's infos."""
    sums: dict[str, float] = {}
    for reward in rewards:
        if reward.kind == "count":
            infos[COUNTS_INFO] = infos.get(COUNTS_INFO, {}) | {reward.source: reward.value}
        else:
            sums[reward.kind] = sums.get(reward.kind, 0.0) + reward.value
    return sums


@dataclass(frozen=True)
class RolloutRunner:
    """Runs rollouts: holds what they share."""

    engine: Engine
    template: Template
    gateway: AnyGateway
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    sampling: Sampling = field(default_factory=Sampling)
    stepper: Stepper = field(default_factory=ToolsAndFeedback)
    observer: RolloutObserver = field(default_factory=NullObserver)
    seed: int = 0
    """The run's seed; the same seed and weights give the same rollouts."""
    reported_drift_causes: set[Cause] = field(default_factory=set)
    """Causes of drift that were already logged with an example."""

    async def run(
        self, task: Task, *, group: str = "", index: int = 0, attempt: int = 0, slot: Slot | None = None
    ) -> Rollout:
        """Runs one rollout; `slot` is held while the engine generates. Failures become stop reasons, not exceptions."""
        return await RolloutLoop(self, task, group, index, attempt, slot or nullcontext()).run()


class _Stop(Exception):
    """Ends the rollout from anywhere in the loop."""

    def __init__(self, stop: StopReason, reason: str = "") -> None:
        super().__init__(reason)
        self.stop, self.reason = stop, reason


class RolloutLoop:
    """The state of one rollout."""

    def __init__(self, runner: RolloutRunner, task: Task, group: str, index: int, attempt: int, slot: Slot) -> None:
        self.runner, self.task, self.group, self.index = runner, task, group, index
        name = f"{group}/{task.id}/{index}"
        self.key, self.seed_key = (name + f".{attempt}" * (attempt > least) for least in (0, SAME_SEED_ATTEMPTS))
        self.template, self.limits, self.observer = runner.template, runner.limits, runner.observer
        self.slot, self.prompt_tokens = slot, 0
        self.builder = LedgerBuilder(runner.template)
        self.turn: Turn | None = None
        """The policy's turn that has no answer yet."""
        self.ignores_calls = False
        """Whether the policy's next turn is asked for something else than calls or an answer, such as a summary."""
        self.counts = {"turns": 0, "summaries": 0, "user_turns": 0, "calls": 0, "invalid": 0}
        self.spent_tokens = 0
        """Tokens that were sampled for the rollout in other chats, as by sub-agents."""
        self.unsampled = sys.maxsize
        """Tokens that may still be sampled in this chat, whatever its length is."""
        self.started = time.perf_counter()
        self.timing: dict[str, float] = {}
        self.timeline: list[Span] = []
        self.infos: dict[str, Any] = {}
        self.rewards: Mapping[str, float] = EMPTY

    @property
    def ledger(self) -> Ledger:
        return self.builder.ledger

    async def run(self) -> Rollout:
        stop, reason = StopReason.WALL_TIME, f"not finished within {self.limits.timeout_s:g} s"
        with anyio.move_on_after(self.limits.timeout_s):
            stop, reason = await self._run_session()
        rollout = Rollout(
            task=self.task.id,
            kind=self.task.kind,
            ledger=self.ledger,
            stop=stop,
            group=self.group,
            index=self.index,
            rewards=EMPTY if stop.is_infrastructure else self.rewards,
            reason=reason,
            timing=self.timing,
            timeline=tuple(self.timeline),
            infos=self.infos,
            earlier=tuple(self.builder.earlier),
        )
        self.observer.on_end(self.key, rollout)
        return rollout

    async def _run_session(self) -> tuple[StopReason, str]:
        """Runs in a gateway session; failures around the policy are stop reasons, too."""
        try:
            async with self.runner.gateway.open(replace(self.task.session_task, rollout=self.key)) as session:
                stop = await self._run_stepper(session)
                await self._collect_rewards(session)
                self._report_drifts(session.specs)
                return stop.stop, stop.reason
        except EngineError as error:
            return StopReason.ENGINE_FAILED, str(error)
        except GatewayError as error:
            return StopReason.TOOL_FAILED, str(error)
        except Exception as error:  # boundary: a plug-in or a template may raise anything; other rollouts continue
            log.exception("rollout %s failed", self.key)
            return StopReason.ERROR, format_error(error)

    async def _run_stepper(self, session: AnySession) -> _Stop:
        self.observer.on_state(self.key, "pending")
        runner = self.runner
        start = RolloutStart(self.key, self.task, session.specs, self.template, self.limits, runner.sampling, session)
        with UserCode():  # A plug-in's `begin` and `finish`, too, may raise anything.
            async with open_stepper(runner.stepper, start) as (first, stepper):
                try:
                    await self._run_turns(session, first, stepper)
                except _Stop as stop:
                    await self._finish_stepper(stepper, stop.stop)
                    return stop

    async def _finish_stepper(self, stepper: Stepper, stop: StopReason) -> None:
        """Lets a per-rollout stepper add infos and exclude spans from the loss."""
        if isinstance(stepper, RolloutStepper) and not stop.is_infrastructure:
            end = await await_user_code(stepper.finish(self.turn, stop))
            self.infos.update(end.infos)
            self.builder.exclude_spans(end.excluded_spans)

    async def _run_turns(self, session: AnySession, first: Step, stepper: Stepper) -> NoReturn:
        await self._start_ledger(first, session.specs)
        self.prompt_tokens = len(self.ledger.expanded)
        while True:
            reply, ended, truncated = await self._generate_turn()
            self.turn = turn = Turn(
                self.task,
                self.counts["turns"],
                reply,
                self.ledger.messages,
                self.ledger,
                session,
                Context(),
                lambda: self._max_tokens,
            )
            if truncated is not None:
                raise truncated
            if finished := await check_finished(stepper, turn):
                raise _Stop(finished if isinstance(finished, StopReason) else StopReason.STEP_DONE)
            self._check_limits(reply)
            step = await self._step(stepper, turn)
            self.turn, self.ignores_calls = None, step.ignore_calls
            if step.history is not None and step.stop is None:
                await self._start_ledger(step, session.specs)
                if not step.messages:
                    continue
                step = replace(step, history=None)
                ended = self.template.is_turn_ended(self.ledger.entries[-1].ids)
            self._append(step, await self._prepare_media(step.messages), ended, session.specs)

    async def _start_ledger(self, step: Step, specs: Sequence[ToolSpec]) -> None:
        """Starts a ledger with a chat, and with what is kept of the one before."""
        layout = await self._prepare_media(add_instructions(step.history or (), specs))
        is_first = not self.ledger.entries
        ids = self.builder.next_ids(step, layout.messages, False, specs)
        outcomes, info = ((), EMPTY) if step.messages else (step.outcomes, step.info)
        if self.task.session_task.tools is not None:
            info = {**info, OFFERED: [spec.name for spec in specs]}
        if step.branch:
            info = {**info, BRANCH: step.branch}
        source = step.branch or (self.task.location if is_first else step.source)
        entry = Entry(Author.TASK, ids, parts=layout.media, outcomes=outcomes, source=source, info=info)
        self.builder.add(self.template.attach_media(layout, entry))
        for kept in step.kept:
            self.builder.add(as_context(kept))

    async def _generate_turn(self) -> tuple[Reply, bool, _Stop | None]:
        """The policy's next turn, whether it ended the turn itself, and the stop if the turn was truncated."""
        prompt_tokens = len(self.ledger.expanded)
        limit = min(self._max_tokens - prompt_tokens, self.unsampled)
        if limit <= 0:
            raise _Stop(StopReason.LENGTH_ROLLOUT, f"{prompt_tokens} tokens leave no room to generate")
        sampling = replace(
            self.runner.sampling,
            max_tokens=min(self.limits.turn_tokens, limit),
            stop_ids=(*self.runner.sampling.stop_ids, *self.template.stop_ids),
            banned_ids=(*self.runner.sampling.banned_ids, *self.template.banned_ids),
            seed=self._turn_seed(),
            experts_from=first_unrouted(self.ledger, self.runner.engine.capabilities),
        )
        generation = await self._generate(sampling)
        if generation.prompt_tokens not in (None, prompt_tokens):
            reason = f"the engine read {generation.prompt_tokens} prompt tokens, but the ledger has {prompt_tokens}"
            raise _Stop(StopReason.MISALIGNED, f"{reason}, images included")
        self.observer.on_generation(self.key, generation, prompt_tokens)
        self.unsampled -= len(generation.ids)
        self.counts["turns"] += 1
        self.counts["summaries"] += self.ignores_calls
        reply = self._record_turn(generation)
        truncated = None
        if generation.finish_reason == "length":
            at_turn_limit = sampling.max_tokens == self.limits.turn_tokens
            truncated = _Stop(StopReason.LENGTH_TURN if at_turn_limit else StopReason.LENGTH_ROLLOUT)
        return reply, self.template.is_turn_ended(generation.ids), truncated

    async def _generate(self, sampling: Sampling) -> Generation:
        """Generates in an engine slot, which is held only meanwhile: rollouts that wait for a tool hold none."""
        self.observer.on_state(self.key, "pending")
        started = time.perf_counter()
        async with self.slot:
            self._record_phase("queueing", started)
            self.observer.on_state(self.key, "generating")
            started = time.perf_counter()
            generation = await self.runner.engine.generate(
                self.ledger.ids, sampling, key=self.key, group=self.group, images=self.ledger.images
            )
        self._record_phase("generating", started)
        return generation

    def _record_turn(self, generation: Generation) -> Reply:
        """Parses the turn and appends it to the ledger, before any limit or stepper can end the rollout."""
        reply = self.template.parse_turn((*self.builder.unfinished_ids, *generation.ids))
        ignored = len(reply.calls) + len(reply.problems) if self.ignores_calls else 0
        reply = replace(reply, calls=(), problems=()) if ignored else limit_calls(reply, self.limits, self.template)
        if not all(call.id for call in reply.calls):
            calls = (
                call if call.id else replace(call, id=f"call_{self.counts['turns']}_{index}")
                for index, call in enumerate(reply.calls)
            )
            reply = replace(reply, calls=tuple(calls))
        info: dict[str, Any] = {IGNORED_CALLS: ignored} if ignored else {}
        if self.builder.unfinished_ids:
            info["own"] = self.template.decode_turn(generation.ids)
        self.builder.add(make_policy_entry(generation, self.template.build_message(reply), reply.calls, info))
        return reply

    def _check_limits(self, reply: Reply) -> None:
        """Stops before a call is made whose answer the policy could not read."""
        limits, counts = self.limits, self.counts
        if self.ignores_calls:
            return
        if counts["turns"] - counts["summaries"] >= limits.assistant_turns:
            raise _Stop(StopReason.ASSISTANT_TURNS)
        if reply.calls and counts["calls"] + len(reply.calls) > limits.tool_calls:
            raise _Stop(StopReason.TOOL_CALLS)
        is_answer = not (reply.calls or reply.problems)
        if is_answer and counts["user_turns"] >= limits.user_turns:
            raise _Stop(StopReason.USER_TURNS)

    async def _step(self, stepper: Stepper, turn: Turn) -> Step:
        self.observer.on_state(self.key, "calling" if turn.reply.calls else "interacting")
        started = time.perf_counter()
        step = await take_step(stepper, turn)
        self._record_phase("calling" if step.author is Author.TOOL else "interacting", started)
        self.observer.on_step(self.key, step, time.perf_counter() - started)
        self.infos.update((name, value) for name, value in step.info.items() if name != CALLS_INFO)
        self.counts["calls"] += len(turn.reply.calls)
        self.counts["user_turns"] += step.author is Author.FEEDBACK and bool(step.messages) and not self.ignores_calls
        all_invalid = bool(step.outcomes) and all(outcome is Outcome.INVALID for outcome in step.outcomes)
        if not self.ignores_calls:
            self.counts["invalid"] = self.counts["invalid"] + 1 if all_invalid else 0
        return step

    async def _prepare_media(self, messages: Sequence[Message]) -> MediaLayout:
        """Prepares messages for the template; decoding images is done in a thread."""
        if not has_media(messages):
            return MediaLayout(tuple(map(join_text, messages)))
        return await to_thread.run_sync(self.template.prepare_media, messages)

    def _append(self, step: Step, layout: MediaLayout, ended: bool, specs: Sequence[ToolSpec]) -> None:
        """Appends an answer to the ledger; without ids if the rollout ends here and the policy will not read it."""
        stop, reason = step.stop, step.reason
        ids: tuple[int, ...] = ()
        if stop is None and self.counts["invalid"] >= self.limits.invalid_turns:
            stop = StopReason.INVALID_CALLS
        if stop is None:
            ids = self.builder.next_ids(step, layout.messages, ended, specs)
            count = len(ids) + sum(width - 1 for width in layout.widths if width)
            if len(self.ledger.expanded) + count >= self._max_tokens:
                stop, reason, ids = StopReason.LENGTH_ROLLOUT, f"an answer of {count} tokens does not fit", ()
        entry = Entry(
            step.author,
            ids,
            parts=step.parts,
            outcomes=step.outcomes,
            reward=step.reward,
            source=step.source,
            info=step.info,
        )
        self.builder.add(self.template.attach_media(layout, entry))
        if stop is not None:
            raise _Stop(stop, reason)
        if not step.insert and step.keep_ids is None:
            self.builder.restart_if_rewritten(specs, self.task.location)

    def _report_drifts(self, specs: Sequence[ToolSpec]) -> None:
        """Counts differences from the template's own rendering by cause, and warns of the first of each in a run."""
        entries = list(self.ledger.entries)
        while entries and not entries[-1].ids:
            entries.pop()
        drifts = find_drifts(self.template, Ledger(tuple(entries)), specs)
        if drifts:
            self.infos["drift"] = dict(Counter(drift.cause for drift in drifts))
        for drift in drifts:
            is_quiet = drift.is_harmless or drift.cause in self.runner.reported_drift_causes
            self.runner.reported_drift_causes.add(drift.cause)
            log.log(logging.INFO if is_quiet else logging.WARNING, "rollout %s: %s", self.key, drift)

    @property
    def budget(self) -> int:
        """The most tokens that the limits leave this chat."""
        limits, response = self.limits, self.limits.response_tokens
        most = limits.rollout_tokens if response is None else min(limits.rollout_tokens, self.prompt_tokens + response)
        return most - self.spent_tokens

    @property
    def _max_tokens(self) -> int:
        """The most tokens that the ledger may have."""
        return min(self.budget, self.runner.engine.capabilities.context_length or self.budget)

    def _turn_seed(self) -> int:
        name = f"{self.runner.seed}/{self.seed_key}/{self.counts['turns']}"
        return int.from_bytes(sha256(name.encode()).digest()[:7], "big")

    def _record_phase(self, phase: str, started: float) -> None:
        duration = time.perf_counter() - started
        self.timing[phase] = self.timing.get(phase, 0.0) + duration
        self.timeline.append(Span(phase, round(started - self.started, 6), round(duration, 6)))

    async def _collect_rewards(self, session: AnySession) -> None:
        """Sums the rewards that tools and the interaction gave, by kind; the scorer applies the weights."""
        await session.finish()
        self.rewards = sum_rewards(session.rewards, self.infos)
        if session.states:
            self.infos[STATES_INFO] = dict(session.states)
