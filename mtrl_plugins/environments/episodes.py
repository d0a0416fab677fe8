"""Environments with `reset` and `step`: a session is an episode, a call or a turn is a step, a task is a seed.

`environment_reset` is for the training loop, which calls it first; so everything an episode says is on a tape.
"""

from __future__ import annotations

import binascii
import json
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from math import fsum, isfinite
from typing import Any, Protocol, Self

import anyio
from anyio import to_thread

from gateway.chat_messages import chat_content
from gateway.errors import ConfigError, GatewayError
from gateway.plural import format_count
from gateway.process.pipe_process import ProcessEnded
from gateway.process.request_process import RequestProcess
from gateway.schema import parse_arguments
from gateway.session import AnyGateway
from gateway.toolset import Session
from gateway.types import (
    DEFAULT_CONTEXT,
    Audience,
    Context,
    Image,
    Outcome,
    Part,
    Task,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
)
from mtrl_plugins.environments.host_process import EnvironmentFailed, EnvironmentHost
from mtrl_plugins.environments.settings import EpisodeSettings
from trainer.data.row_media import Row
from trainer.ledger import Author, Message
from trainer.rollout.rollout import StopReason
from trainer.rollout.steppers import CALLS_INFO, RolloutEnd, RolloutStart, Step, ToolsAndFeedback, Turn
from trainer.rollout.task import Task as RowTask

MAX_PARTS = 64
"""Parts of one observation that are kept."""
MAX_TEXT = 2**20
"""Characters of one text that the policy reads."""


@dataclass(frozen=True, slots=True)
class EpisodeAnswer:
    """What an environment answers to `reset` or to an action."""

    parts: tuple[Part, ...]
    reward: float | None = None
    """None if the environment gave none."""
    terminated: bool = False
    """The environment came to an end."""
    truncated: bool = False
    """A limit of steps or of time ended it."""
    invalid: str = ""
    """Why the policy's action was none; nothing happened then."""


class Episode(Protocol):
    """One open episode."""

    async def step(self, tool: str, action: Mapping[str, Any]) -> EpisodeAnswer:
        """Takes an action: the arguments of a tool, or `{"text": ...}` if it has no name. Raises EnvironmentFailed."""
        ...


class EpisodeSource(Protocol):
    """Where episodes come from: a host process, or a server. One task enters and leaves it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: Any) -> bool | None: ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The environment's tools, each with `name`, `description` and `parameters`."""
        ...

    def open(self, seed: int, options: Mapping[str, Any]) -> AbstractAsyncContextManager[tuple[Episode, EpisodeAnswer]]:
        """Begins an episode; the context ends it. Raises EnvironmentFailed."""
        ...


def read_answer(value: Any, owner: str) -> EpisodeAnswer:
    """An answer of a host process. Raises EnvironmentFailed if it is none."""
    if not isinstance(value, Mapping):
        raise EnvironmentFailed(f"{owner} answered {value!r:.80}")
    if invalid := value.get("invalid"):
        return EpisodeAnswer((), invalid=str(invalid))
    given = value.get("parts") or ()
    parts = tuple(_read_part(part, owner) for part in given[:MAX_PARTS])
    if len(given) > MAX_PARTS:
        parts += (Text(f"(and {len(given) - MAX_PARTS} more parts)"),)
    ended = bool(value.get("terminated")), bool(value.get("truncated"))
    return EpisodeAnswer(parts, read_reward(value.get("reward"), owner), *ended)


def read_reward(value: Any, owner: str) -> float | None:
    """A reward, if there is one. Raises EnvironmentFailed if it is not a finite number."""
    if value is None:
        return None
    if not isinstance(value, int | float) or not isfinite(value):
        raise EnvironmentFailed(f"{owner} gave the reward {value!r:.40}, which is not a number")
    return float(value)


def cut_text(text: str) -> str:
    """The text, or its beginning with the number of characters that are left out."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n(and {len(text) - MAX_TEXT} more characters)"


def _read_part(part: Any, owner: str) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return Text(cut_text(str(part.get("text", ""))))
    if kind == "image":
        try:
            return Image(b64decode(part["data"], validate=True), str(part.get("mime") or "image/png"))
        except (KeyError, TypeError, binascii.Error) as error:
            raise EnvironmentFailed(f"{owner} sent an image that is not base64 ({error})") from error
    raise EnvironmentFailed(f"{owner} sent a part that cannot be shown: {part!r:.80}")


class ProcessEpisodes:
    """The episodes of one environment."""

    def __init__(self, host: EnvironmentHost) -> None:
        self.host = host

    async def __aenter__(self) -> Self:
        await to_thread.run_sync(self.host.start)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.host.stop_async()

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """What the adapter says which tools the environment has."""
        tools: Sequence[Mapping[str, Any]] = self.host.about.get("tools") or ()
        return tools

    @asynccontextmanager
    async def open(self, seed: int, options: Mapping[str, Any]) -> AsyncIterator[tuple[Episode, EpisodeAnswer]]:
        """Begins an episode."""
        episode = ProcessEpisode(self.host, await self.host.running())
        try:
            yield episode, await episode.ask("open", seed=seed, options=dict(options))
        finally:
            episode.close()


class ProcessEpisode:
    """An episode in one process, under a name that it has there."""

    def __init__(self, host: EnvironmentHost, child: RequestProcess) -> None:
        self._host, self._child, self._name = host, child, host.join(child)
        self._hangs = False

    async def ask(self, operation: str, **fields: Any) -> EpisodeAnswer:
        """Sends a request. Raises EnvironmentFailed if the environment broke or took too long."""
        try:
            answer = await self._host.ask(self._child, operation, {"episode": self._name, **fields})
        except EnvironmentFailed as error:
            self._hangs = isinstance(error.__cause__, TimeoutError)
            raise
        return read_answer(answer, self._host.name)

    async def step(self, tool: str, action: Mapping[str, Any]) -> EpisodeAnswer:
        return await self.ask("step", action=dict(action))

    def close(self) -> None:
        """Ends the episode, without waiting for the environment."""
        with suppress(ProcessEnded):
            self._child.send({"do": "close", "episode": self._name})
        self._host.leave(self._child, hangs=self._hangs)


RESET, TEXT_STEP = "environment_reset", "environment_step"
"""The tools that only the training loop may call: to begin an episode, and to act with the text of a turn."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object", "properties": {}}
CLOSE_S = 10.0
"""How long an episode may take to close."""


class EpisodeToolset:
    """One environment as a toolset."""

    def __init__(self, settings: EpisodeSettings, source: EpisodeSource) -> None:
        self.settings, self.source = settings, source
        self.specs: Sequence[ToolSpec] = ()
        self.slots: anyio.Semaphore | None = None
        """Free places for episodes."""

    async def __aenter__(self) -> Self:
        await self.source.__aenter__()
        self.slots = anyio.Semaphore(self.settings.sessions)
        own = [self._spec(RESET, "Begins an episode.", ANY_OBJECT, "loop")]
        if self.settings.actions == "text":
            own.append(self._spec(TEXT_STEP, "Acts with the text of the policy's turn.", ANY_OBJECT, "loop"))
            self.specs = own
        else:
            tools = self.source.tools
            self.specs = [
                *(self._spec(tool["name"], tool["description"], tool["parameters"], "policy") for tool in tools),
                *own,
            ]
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self.source.__aexit__(*error)

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        session = EpisodeSession(self)
        try:
            yield session
        finally:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await session.close()

    def _spec(self, name: str, description: str, parameters: Mapping[str, Any], audience: Audience) -> ToolSpec:
        return ToolSpec(name, description, parameters, audience, owner=self.settings.title)


class EpisodeSession:
    """One episode. Calls of one turn are steps, one after the other."""

    def __init__(self, toolset: EpisodeToolset) -> None:
        self._toolset, self._settings = toolset, toolset.settings
        self._stack = AsyncExitStack()
        self._episode: Episode | None = None
        self._lock = anyio.Lock()
        self._steps = 0
        self._rewards: list[float] = []
        self._ended = ""
        """How the episode ended."""

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._toolset.specs

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        arguments = parse_arguments(call.arguments)
        async with self._lock:
            try:
                if call.name == RESET:
                    return await self._reset(int(arguments["seed"]), arguments.get("options") or {})
                return await self._step("" if call.name == TEXT_STEP else call.name, arguments)
            except EnvironmentFailed as error:
                self._ended = "its environment failed"
                return ToolResult((Text("The environment failed."),), Outcome.UNAVAILABLE, reason=str(error))

    async def finish(self) -> Mapping[str, float]:
        """Nothing: each step has its reward."""
        return {}

    async def close(self) -> None:
        """Ends the episode."""
        await self._stack.aclose()

    async def _reset(self, seed: int, options: Mapping[str, Any]) -> ToolResult:
        """Begins the episode, as soon as there is a place for it."""
        slots, wait_s = self._toolset.slots, self._settings.wait_s
        if slots is None or self._episode is not None:
            raise EnvironmentFailed(f"{self._settings.title}: the session has an episode already")
        with anyio.move_on_after(wait_s) as scope:
            await slots.acquire()
        if scope.cancelled_caught:
            problem = f"{self._settings.title}: none of {self._settings.sessions} sessions was free within {wait_s:g} s"
            raise EnvironmentFailed(f"{problem}\n  remedy: raise `environment.sessions` or `environment.wait_s`")
        self._stack.callback(slots.release)
        self._episode, answer = await self._stack.enter_async_context(self._toolset.source.open(seed, options))
        if answer.terminated or answer.truncated:
            problem = f"{self._settings.title} ended an episode before the policy's first turn (seed {seed})"
            raise EnvironmentFailed(f"{problem}: {ToolResult(answer.parts).text}")
        return self._result(replace(answer, reward=None))

    async def _step(self, tool: str, action: Mapping[str, Any]) -> ToolResult:
        if self._episode is None or self._ended:
            text = f"The episode is over: {self._ended or 'it has not begun'}."
            return ToolResult((Text(text),), Outcome.ERROR, done=bool(self._ended))
        answer = await self._episode.step(tool, action)
        if answer.invalid:
            return ToolResult((Text(answer.invalid),), Outcome.INVALID, reason="the action is not in the action space")
        self._steps += 1
        self._rewards.append(answer.reward or 0.0)
        if self._steps >= self._settings.max_steps and not answer.terminated:
            answer = replace(answer, truncated=True)
        return self._result(answer)

    def _result(self, answer: EpisodeAnswer) -> ToolResult:
        """What the policy reads, and what the operator does."""
        notes = []
        if answer.reward is not None and self._settings.show_reward:
            notes.append(f"reward: {answer.reward:g}")
        if answer.terminated:
            self._ended = "it has ended"
        elif answer.truncated:
            self._ended = f"it was cut off after {self._steps} steps"
        if self._ended:
            notes.append(f"The episode is over: {self._ended}.")
        parts: tuple[Part, ...] = (*answer.parts, *(Text(note) for note in notes))
        metrics = {
            "steps": self._steps,
            "return": fsum(self._rewards),
            "terminated": answer.terminated,
            "truncated": answer.truncated and not answer.terminated,
        }
        return ToolResult(parts, reward=answer.reward, done=bool(self._ended), metrics=metrics)


def reset_call(seed: int, options: Mapping[str, Any]) -> ToolCall:
    """The call that begins an episode."""
    return ToolCall("reset", RESET, json.dumps({"seed": seed, **({"options": dict(options)} if options else {})}))


def text_call(text: str, number: int) -> ToolCall:
    """The call that acts with the text of a turn."""
    return ToolCall(f"turn_{number}", TEXT_STEP, json.dumps({"text": text}))


COLUMN = "environment"
"""The column of a row with its episode: `seed`, and `options` for the environment."""
INFO = "environment"
"""The key of a rollout's infos with how its episode ended."""
LOOP = Context(audience="loop")
MAX_SEED = 2**31
SHOWN = 300
"""Characters of the first observation that a trial shows."""


class EpisodeStepper:
    """Begins an episode for each rollout; siblings begin with the same seed."""

    def __init__(self, settings: EpisodeSettings) -> None:
        self.settings = settings

    @asynccontextmanager
    async def begin(self, start: RolloutStart) -> AsyncIterator[tuple[Step, EpisodeRollout]]:
        """Resets the environment. Raises EnvironmentFailed if it cannot be."""
        seed, options = read_episode(start.task)
        result = await start.session.call(reset_call(seed, options), LOOP)
        if result.outcome is not Outcome.OK:
            raise EnvironmentFailed(result.reason or result.text)
        history = add_observation(start.task.messages, chat_content(result.parts))
        yield Step(history=history), EpisodeRollout(self.settings, seed, result)

    def check_finished(self, turn: Turn) -> bool:
        return False

    def step(self, turn: Turn) -> Step:
        raise NotImplementedError("call `begin` for each rollout")


class EpisodeRollout(ToolsAndFeedback):
    """One rollout in its episode."""

    def __init__(self, settings: EpisodeSettings, seed: int, opening: ToolResult) -> None:
        self.settings = settings
        self.infos: dict[str, Any] = {"seed": seed, **opening.metrics}

    def check_finished(self, turn: Turn) -> bool | StopReason:
        """A turn without a call ends the rollout, unless turns themselves are actions."""
        if self.settings.actions == "text":
            return False
        return super().check_finished(turn)

    async def step(self, turn: Turn) -> Step:
        """Calls the environment's tool, or acts with the text."""
        if self.settings.actions == "tool":
            step = await super().step(turn)
            for call in step.info.get(CALLS_INFO, ()):
                self.infos.update(call.get("metrics") or {})
            return step
        result = await turn.session.call(text_call(turn.reply.content, turn.number), LOOP)
        self.infos.update(result.metrics)
        failed = result.outcome.is_infrastructure
        stop = StopReason.TOOL_FAILED if failed else StopReason.FEEDBACK_DONE if result.done else None
        return Step(
            Author.FEEDBACK,
            ({"role": "user", "content": chat_content(result.parts)},),
            parts=result.parts,
            outcomes=(result.outcome,),
            reward=result.reward,
            stop=stop,
            reason=result.reason or "" if failed else "",
            source=self.settings.framework,
        )

    async def finish(self, turn: Turn | None, stop: StopReason) -> RolloutEnd:
        """How the episode ended is passed on to reward functions and kept with the rollout."""
        return RolloutEnd({INFO: dict(self.infos)})


def add_observation(messages: tuple[Message, ...], observation: Any) -> tuple[Message, ...]:
    """The chat with an observation, a text or blocks of content, at the end of its last message."""
    if observation is None:
        return messages
    content = messages[-1].get("content") or ""
    if isinstance(content, str) and isinstance(observation, str):
        return (*messages[:-1], {**messages[-1], "content": content + observation})
    before = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    added = [{"type": "text", "text": observation}] if isinstance(observation, str) else list(observation)
    return (*messages[:-1], {**messages[-1], "content": before + added})


def read_episode(task: RowTask) -> tuple[int, Mapping[str, Any]]:
    """A task's seed, made from its id if the row has none, and its options. Raises EnvironmentFailed for bad rows."""
    episode = task.columns.get(COLUMN)
    episode = {} if episode is None else episode
    if not isinstance(episode, Mapping):
        problem = f"{task.location}: the column `{COLUMN}` is {episode!r:.60}"
        raise EnvironmentFailed(f"{problem}\n  remedy: write {{seed: 3, options: {{...}}}}")
    seed, options = episode.get("seed"), episode.get("options")
    if seed is None:
        seed = int.from_bytes(sha256(task.id.encode()).digest()[:8], "big") % MAX_SEED
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise EnvironmentFailed(f"{task.location}: the seed {seed!r:.40} is no whole number from 0 on")
    return seed, options if isinstance(options, Mapping) else {}


EVAL_SEEDS = 1_000_000_000
"""The first seed of held-out tasks, so far from those of training that they never meet."""


def make_rows(settings: EpisodeSettings, split: str) -> list[Row]:
    """The rows of a split, each with a seed; they are made without the environment."""
    count = settings.n_tasks if split == "train" else settings.n_eval_tasks
    first = settings.first_seed + (0 if split == "train" else EVAL_SEEDS)
    if settings.first_seed + settings.n_tasks > EVAL_SEEDS or first + count > MAX_SEED:
        problem, remedy = "and n_tasks reach the seeds of held-out tasks", f"stay below {EVAL_SEEDS}"
        raise ConfigError(problem, field="environment.first_seed", remedy=remedy)
    prompt = settings.prompt if settings.prompt is not None else default_prompt(settings)
    return [
        {"id": f"{split}-{seed}", "prompt": prompt, "environment": {"seed": seed}}
        for seed in range(first, first + count)
    ]


def default_prompt(settings: EpisodeSettings) -> str:
    """How to act, in words; the environment itself says the rest."""
    name = "an environment" if settings.framework == "openenv" else settings.id
    if settings.actions == "text":
        return f"You are in {name}. Each of your messages is one action; nothing else is read.\n\n"
    return f"You are in {name}. Act by calling a tool, once in each turn, until the episode is over.\n\n"


async def describe_opening(settings: EpisodeSettings, gateway: AnyGateway) -> str:
    """What the first episode begins with. Raises GatewayError if it cannot be begun."""
    async with gateway.open(Task(settings.id)) as session:
        result = await session.call(reset_call(settings.first_seed, {}), LOOP)
    if result.outcome is not Outcome.OK:
        raise GatewayError(result.reason or result.text)
    media = len(result.parts) - sum(hasattr(part, "text") for part in result.parts)
    seen = result.text if len(result.text) <= SHOWN else f"{result.text[:SHOWN]}..."
    images = f" and {format_count(media, 'image')}" if media else ""
    return f"{images}\n{seen}"
