"""One rollout's session at the endpoint: generates the policy's turns for an agent, and records them in a tree."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import takewhile
from typing import Any

import anyio
from anyio import to_thread

from gateway.session import AnySession
from gateway.types import EMPTY
from mtrl_plugins.agents.requests import (
    FinishReason,
    MessageCache,
    PolicyAnswer,
    PolicyProblem,
    PolicyRequest,
    ProblemKind,
    TurnStart,
    find_session,
    make_call_id,
)
from mtrl_plugins.agents.settings import AgentSettings
from mtrl_plugins.agents.turn_stream import TurnListener, TurnStream
from mtrl_plugins.agents.turn_tree import Continuation, LedgerPrefixes, PolicyTurn, TurnTree, tools_key
from trainer.engine.base import EngineError, Generation, OnIds, Sampling
from trainer.ledger import OFFERED, Author, Entry, Ledger, Message
from trainer.parse.base import Reply
from trainer.rollout.ledger_builder import make_policy_entry
from trainer.rollout.loop import RolloutRunner, Slot, add_instructions, find_offered, first_unrouted
from trainer.rollout.rollout import StopReason
from trainer.template import Template
from trainer.template.errors import TemplateError
from trainer.template.media_layout import MediaLayout, has_media


class SessionUse:
    """The requests of one session: it is idle while none is under way."""

    def __init__(self) -> None:
        self._under_way = 0
        self._ended_at = time.monotonic()
        self.abandoned = False
        """Whether the session was ended because it was idle for too long."""

    @property
    def idle_s(self) -> float:
        """For how long there was no request; 0 while one is under way."""
        return 0.0 if self._under_way else time.monotonic() - self._ended_at

    def touch(self) -> None:
        """Notes a request that is over at once."""
        self._ended_at = time.monotonic()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """A block in which a request is answered."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            self.touch()

    def remaining_s(self, limit_s: float) -> float:
        """Seconds until the session was idle for so long, if nothing comes; 0 if it was."""
        return max(0.0, limit_s - self.idle_s)


@dataclass
class SampledTokens:
    """The tokens of one rollout, counted where the engine returns them and not where they are recorded."""

    count: int = 0
    discarded: int = 0
    """Tokens of turns that were not recorded, since the engine counted another prompt."""
    retokenised: int = 0
    """Prompts whose beginning, up to the policy's latest turn, is not what the engine read and sampled before."""
    _known: set[int] = field(default_factory=set)

    def check_prompt(self, known: tuple[int, ...]) -> None:
        """Compares the beginning of a prompt, up to the end of a turn, with what went through the engine."""
        if known and hash(known) not in self._known:
            self.retokenised += 1

    def discard(self, count: int) -> None:
        """Counts tokens of a turn that was given up while it was written."""
        self.count += count
        self.discarded += count

    @contextmanager
    def recording(self, prompt: tuple[int, ...], ids: tuple[int, ...]) -> Iterator[None]:
        """Counts a turn while it is recorded; if that fails, its tokens are discarded."""
        self.count += len(ids)
        try:
            yield
        except BaseException:
            self.discarded += len(ids)
            raise
        self._known.add(hash((*prompt, *ids)))


SMALL_CHARS = 65_536
"""A longer chat is rendered and encoded in a thread."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of one request."""

    chat: Continuation
    entry: Entry
    ledger: Ledger
    """Everything before the policy's turn."""
    template: Template
    tools: bytes
    """The digest of the tools."""


async def prepare_layout(template: Template, messages: Sequence[Message]) -> MediaLayout:
    """Prepares messages for the template; decoding images is done in a thread. Raises PolicyProblem."""
    if not has_media(messages):
        return MediaLayout(tuple(messages))
    try:
        return await to_thread.run_sync(template.prepare_media, messages)
    except TemplateError as error:
        raise PolicyProblem("invalid_request", str(error), param="messages") from error


async def render_entry(
    template: Template, parent: PolicyTurn | None, layout: MediaLayout, tools: Sequence[Mapping[str, Any]]
) -> Entry:
    """The entry before the policy's turn. Raises PolicyProblem for what the template refuses."""
    rendering = partial(_render, template, parent, layout, tools)
    is_small = sum(len(str(message.get("content"))) for message in layout.messages) <= SMALL_CHARS
    try:
        return rendering() if is_small else await to_thread.run_sync(rendering)
    except TemplateError as error:
        raise PolicyProblem("invalid_request", str(error), param="messages") from error


def join_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with those of the system at the start as one, as most templates take no second one."""
    texts = [str(message["content"]) for message in takewhile(lambda message: message["role"] == "system", messages)]
    if len(texts) < 2:
        return tuple(messages)
    return ({"role": "system", "content": "\n\n".join(texts)}, *messages[len(texts) :])


def _render(
    template: Template, parent: PolicyTurn | None, layout: MediaLayout, tools: Sequence[Mapping[str, Any]]
) -> Entry:
    """The entry before the policy's turn: a whole prompt, or what follows the turn before."""
    info: Mapping[str, Any] = EMPTY
    if parent is None:
        ids, author, info = template.encode_prompt(layout.messages, tools), Author.TASK, {OFFERED: [*tools]}
    else:
        calls = parent.message.get("tool_calls") or ()
        ids = template.encode_tail(layout.messages, ended=parent.ended, calls=calls)
        author = Author.TOOL if layout.messages[0]["role"] == "tool" else Author.FEEDBACK
    return template.attach_media(layout, Entry(author, ids, parts=layout.media, source="agent", info=info))


def cut_stop_string(
    template: Template, reply: Reply, ids: tuple[int, ...], stops: Sequence[str]
) -> tuple[Reply, str | None]:
    """The reply without the stop string that ended it, as the protocols promise; the ids stay."""
    text = "" if not stops or template.is_turn_ended(ids) else template.decode_turn(ids)
    ends = [(text.find(stop), stop) for stop in stops if stop in text]
    if not ends:
        return reply, None
    stop = min(ends)[1]
    index = reply.content.find(stop)
    return (replace(reply, content=reply.content[:index]) if index >= 0 else reply), stop


MOST_COUNTS = 50
"""Bounds how many kinds are counted by name: agents choose the names."""


END_S = 5.0
"""Limit for requests under way to end with their session."""


@dataclass(frozen=True, slots=True)
class RolloutIdentity:
    """The names under which a rollout generates."""

    key: str
    group: str = ""


@dataclass
class AgentSession:
    """What an agent has at the endpoint during one rollout."""

    runner: RolloutRunner
    settings: AgentSettings
    identity: RolloutIdentity
    slot: Slot = field(default_factory=nullcontext)
    tools: AnySession | None = None
    """The gateway's session of the rollout, which agents also reach as an MCP server."""
    opening: Mapping[str, Any] = field(default_factory=dict)
    """What an external program is told of the task."""
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    api_key: str = field(default_factory=lambda: f"mtrl-{secrets.token_urlsafe(24)}", repr=False)
    tree: TurnTree = field(default_factory=TurnTree)
    stop: tuple[StopReason, str] | None = None
    """Why the policy writes no further turn: a limit, or an engine that failed."""
    overflow: str = ""
    """Set while the latest request did not fit; an agent may shorten its chat and go on."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The rewards that were posted, by name."""
    counts: Counter[str] = field(default_factory=Counter)
    """Requests that were refused or hung up, and tools that were left out, by kind."""
    sampled: SampledTokens = field(default_factory=SampledTokens)
    closed: bool = False
    stopped: anyio.Event = field(default_factory=anyio.Event)
    """Set with `stop`."""
    ended: anyio.Event = field(default_factory=anyio.Event)
    """Set when an external program says that it is done."""
    use: SessionUse = field(default_factory=SessionUse)
    messages: MessageCache = field(default_factory=MessageCache)
    """What the session's requests held."""
    _prefixes: LedgerPrefixes = field(default_factory=LedgerPrefixes)
    _answers: int = 0
    """How many were begun."""
    _generating: list[anyio.CancelScope] = field(default_factory=list)
    _generation_ended: anyio.Event = field(default_factory=anyio.Event)
    _attempts: Counter[bytes] = field(default_factory=Counter)
    _chats: dict[str, tuple[Message, ...]] = field(default_factory=dict)
    """Chats up to an answer, by its id, for requests that name the one before instead of sending it again."""

    async def answer(self, request: PolicyRequest, listener: TurnListener | None = None) -> PolicyAnswer:
        """The policy's turn in answer to a request; the listener is told of it as it comes. Raises PolicyProblem."""
        try:
            with self.use.under_way():
                return await self._answer(request, listener)
        except PolicyProblem as problem:
            self.counts[f"refused_{problem.kind}"] += 1
            raise
        except anyio.get_cancelled_exc_class():
            self.counts["hung_up"] += 1
            raise

    async def count_tokens(self, request: PolicyRequest) -> int:
        """The tokens of the prompt that the request would make. Raises PolicyProblem."""
        prompt = await self._make_prompt(self._complete(request), counts=False)
        return len(prompt.ledger.expanded)

    @property
    def context_length(self) -> int:
        """The most tokens of a chat, the policy's turn included."""
        limit = self.runner.limits.rollout_tokens
        return min(limit, self.runner.engine.capabilities.context_length or limit)

    async def _answer(self, request: PolicyRequest, listener: TurnListener | None) -> PolicyAnswer:
        self._check_open()
        for kind in request.options.get("left_out", ()):  # Of tools at the provider.
            name = f"left_out_{kind[:40]}"
            self.counts[name if name in self.counts or len(self.counts) < MOST_COUNTS else "left_out"] += 1
        if request.asked_form:
            self.counts["asked_form"] += 1
        request = self._complete(request)
        prompt = await self._make_prompt(request)
        sampling = self._make_sampling(prompt, request)
        self._answers += 1
        start = TurnStart(f"{self.id}-{self._answers}", len(prompt.ledger.expanded))
        stream = TurnStream(prompt.template, request.stop, start, listener) if listener else None
        generation = await self._generate(prompt, sampling, stream.feed if stream else None)
        with self.sampled.recording(prompt.ledger.ids, generation.ids):
            self._check_aligned(prompt, generation)
            return self._record(prompt, request, generation, start.id, stream)

    def _stop(self, stop: StopReason, reason: str = "") -> None:
        """Ends the policy's part in the rollout; what came first counts."""
        self.stop = self.stop or (stop, reason)
        self.stopped.set()

    def _check_open(self) -> None:
        if self.closed:
            raise PolicyProblem("ended", "the session has ended")
        if self.stop is None and len(self.tree.turns) >= self.runner.limits.assistant_turns:
            self._stop(StopReason.ASSISTANT_TURNS, "")
        if self.stop is not None:
            kind: ProblemKind = "unavailable" if self.stop[0].is_infrastructure else "ended"
            raise PolicyProblem(kind, f"the rollout has ended: {': '.join(filter(None, self.stop))}")

    async def _make_prompt(self, request: PolicyRequest, *, counts: bool = True) -> Prompt:
        if request.messages[-1]["role"] == "assistant":
            raise PolicyProblem("unsupported", "the last message is the assistant's: nothing asks for a turn")
        tools = tools_key(request.tools)
        chat = self.tree.find(request.messages, tools, counts=counts)
        template = self.runner.template.with_tools(request.tools)
        layout = await prepare_layout(template, chat.rest)
        before = self._prefixes.find(chat.parent)
        entry = await render_entry(template, chat.parent, layout, request.tools)
        if counts:
            self.sampled.check_prompt(before.ids)
        return Prompt(chat, entry, before + entry, template, tools)

    def _complete(self, request: PolicyRequest) -> PolicyRequest:
        """The request with the chat that it only names, and with one system message, which MCP servers may add to."""
        previous = request.options.get("previous")
        messages = request.messages
        if previous is not None:
            if previous not in self._chats:
                raise PolicyProblem("not_found", f"there is no answer {previous!r}", param="previous_response_id")
            instructions = [message for message in messages[:1] if message["role"] == "system"]
            before = [message for message in self._chats[previous] if message["role"] != "system"]
            messages = (*instructions, *before, *messages[len(instructions) :])
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        if {find_session(str(call.get("id"))) for call in calls} - {None, self._salt}:
            raise PolicyProblem("invalid_request", "the chat holds calls of another session", param="messages")
        messages = join_system(messages)
        if self.tools is not None:
            messages = tuple(add_instructions(messages, find_offered(self.tools.specs, request.tools)))
        return replace(request, messages=messages)

    @property
    def _salt(self) -> str:
        """What ids of this session's calls end with. The same in a replay: templates may show ids."""
        return sha256(self.identity.key.encode()).hexdigest()[:6]

    def _make_sampling(self, prompt: Prompt, request: PolicyRequest) -> Sampling:
        sampling, template = self.runner.sampling, prompt.template
        length = len(prompt.ledger.expanded)
        room = self.context_length - length
        if room <= 0:
            self.overflow = f"a prompt of {length} tokens leaves no room to generate"
            text = f"the maximum context length is {self.context_length} tokens, but the messages have {length}"
            raise PolicyProblem("context_length", text, param="messages")
        if self.settings.sampling == "request":
            temperature = sampling.temperature if request.temperature is None else request.temperature
            top_p = sampling.top_p if request.top_p is None else request.top_p
            sampling = replace(sampling, temperature=temperature, top_p=top_p)
        return replace(
            sampling,
            max_tokens=min(self.runner.limits.turn_tokens, room, request.max_tokens or room),
            stop_ids=(*sampling.stop_ids, *template.stop_ids),
            stop=(*sampling.stop, *request.stop),
            banned_ids=(*sampling.banned_ids, *template.banned_ids),
            seed=self._seed(self._prefixes.digest(prompt.chat.parent, prompt.entry)),
            experts_from=first_unrouted(prompt.ledger, self.runner.engine.capabilities),
        )

    def _seed(self, prompt: bytes) -> int:
        """A seed that depends on the prompt, not on the order in which requests arrive."""
        self._attempts[prompt] += 1
        name = f"{self.runner.seed}/{self.identity.key}/{self._attempts[prompt]}/"
        return int.from_bytes(sha256(name.encode() + prompt).digest()[:7], "big")

    async def end_requests(self) -> None:
        """Ends the requests under way: nothing is generated for a rollout that is over."""
        self.closed = True
        for scope in self._generating:
            scope.cancel()
        with anyio.move_on_after(END_S, shield=True):
            while self._generating:
                self._generation_ended = anyio.Event()
                await self._generation_ended.wait()

    async def _generate(self, prompt: Prompt, sampling: Sampling, on_ids: OnIds | None) -> Generation:
        """The policy's next turn. What was streamed of a turn that is given up counts as sampled and discarded."""
        streamed = 0

        def count_ids(ids: Sequence[int]) -> None:
            nonlocal streamed
            streamed += len(ids)
            if on_ids is not None:
                on_ids(ids)

        with anyio.CancelScope() as scope:
            self._generating.append(scope)
            try:
                self._check_open()
                return await self._generate_in_slot(prompt, sampling, count_ids if on_ids else None)
            except anyio.get_cancelled_exc_class():
                self.sampled.discard(streamed)
                raise
            finally:
                self._generating.remove(scope)
                self._generation_ended.set()
                if not self._generating and not self.closed:
                    self.runner.observer.on_state(self.identity.key, "calling")
        raise PolicyProblem("ended", "the session has ended")

    async def _generate_in_slot(self, prompt: Prompt, sampling: Sampling, on_ids: OnIds | None) -> Generation:
        runner, ledger = self.runner, prompt.ledger
        runner.observer.on_state(self.identity.key, "pending")
        try:
            async with self.slot:
                runner.observer.on_state(self.identity.key, "generating")
                return await runner.engine.generate(
                    ledger.ids,
                    sampling,
                    key=self.identity.key,
                    group=self.identity.group,
                    images=ledger.images,
                    on_ids=on_ids,
                )
        except EngineError as error:
            self._stop(StopReason.ENGINE_FAILED, str(error))
            raise PolicyProblem("unavailable", "the engine failed") from error

    def _check_aligned(self, prompt: Prompt, generation: Generation) -> None:
        length = len(prompt.ledger.expanded)
        if generation.prompt_tokens not in (None, length):
            counted = f"the engine read {generation.prompt_tokens} prompt tokens, but the ledger has {length}"
            self._stop(StopReason.MISALIGNED, f"{counted}, images included")
        else:
            return
        raise PolicyProblem("unavailable", self.stop[1] if self.stop else "the engine failed")

    def _record(
        self, prompt: Prompt, request: PolicyRequest, generation: Generation, answer_id: str, stream: TurnStream | None
    ) -> PolicyAnswer:
        """Adds the turn to the tree, as the agent is given it."""
        template, length = prompt.template, len(prompt.ledger.expanded)
        self.runner.observer.on_generation(self.identity.key, generation, length)
        ids = generation.ids
        reply, stop_string = cut_stop_string(template, template.parse_turn(ids), ids, request.stop)
        reply = stream.finish(reply) if stream else reply
        calls = reply.calls if request.parallel_calls else reply.calls[:1]
        ids_of = (make_call_id(self.tree.added, index, self._salt) for index in range(len(calls)))
        reply = replace(reply, calls=tuple(replace(call, id=id) for call, id in zip(calls, ids_of, strict=True)))
        message = template.build_message(reply)
        entry = make_policy_entry(generation, message, reply.calls)
        ended = template.is_turn_ended(ids)
        turn = PolicyTurn(prompt.chat.parent, prompt.entry, entry, message, prompt.tools, ended)
        self.tree.add(turn, prompt.chat)
        self._prefixes.add(turn, prompt.ledger + entry)
        self.overflow = ""
        if "previous" in request.options:
            self._chats[f"resp_{answer_id}"] = (*request.messages, message)
        finish: FinishReason = (
            "tool_calls" if reply.calls else "length" if generation.finish_reason == "length" else "stop"
        )
        pieces = [template.tokenizer.decode([id]) for id in ids] if request.logprobs else ()
        return PolicyAnswer(
            id=answer_id,
            content=reply.content,
            reasoning=reply.reasoning,
            calls=reply.calls,
            finish_reason=finish,
            prompt_tokens=length,
            cached_tokens=generation.cached_tokens,
            completion_tokens=len(ids),
            stop_sequence=stop_string,
            tokens=tuple(zip(pieces, generation.logprobs, strict=False)),
        )
