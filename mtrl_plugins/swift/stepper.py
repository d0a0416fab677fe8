"""The stepper that runs ms-swift's multi-turn schedulers; one scheduler object serves all rollouts, as in ms-swift."""

from __future__ import annotations

import inspect
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from types import TracebackType
from typing import Any

import anyio
import anyio.lowlevel

from gateway.await_user_code import await_user_code
from gateway.errors import ConfigError, describe_exception, safe_repr
from gateway.types import Audio, Image, Video
from gateway.user_code import UserCode
from gateway.wire import to_plain
from mtrl_plugins.swift.orm import find_registered, instantiate, load_plugin_files
from mtrl_plugins.swift.protocol import (
    CHAT_INFO,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    Messages,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    UsageInfo,
)
from mtrl_plugins.swift.schedulers import (
    MultiTurnScheduler,
    RolloutEnded,
    RolloutScheduler,
    SchedulerError,
    multi_turns,
)
from trainer.ledger import Author, Entry, Message
from trainer.rollout.rollout import StopReason
from trainer.rollout.steppers import RolloutEnd, RolloutStart, Step, Turn

IMAGE_MARK = "<image>"
REQUEST_COLUMNS = ("messages", "images", "audios", "videos", "tools", "objects", "uuid")
"""Columns that are fields of a request; the others are in its `data_dict`."""


def build_request(opening: RolloutStart) -> RolloutInferRequest:
    """The scheduler's first request for a row; a copy, which the scheduler may change."""
    task = opening.task
    images: list[Any] = []
    messages = [_flatten_message(message, images) for message in task.messages]
    row = deepcopy(dict(task.columns))
    tools = row.get("tools")
    return RolloutInferRequest(
        messages=messages,
        images=images,
        tools=tools if isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools) else None,
        data_dict={name: value for name, value in row.items() if name not in REQUEST_COLUMNS},
        uuid=opening.key,
    )


def build_request_config(opening: RolloutStart) -> RequestConfig:
    """The sampling options as ms-swift's request configuration."""
    sampling = opening.sampling
    return RequestConfig(
        max_tokens=opening.limits.turn_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        logprobs=True,
    )


def _flatten_message(message: Message, images: list[Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part_to_text(part, images) for part in content)
    return {**deepcopy({key: value for key, value in message.items() if key != "content"}), "content": content}


def _part_to_text(part: Mapping[str, Any], images: list[Any]) -> str:
    media = part.get(str(part.get("type")))
    if isinstance(media, Image | Audio | Video):
        images.append(f"data:{media.mime};base64,{b64encode(media.data).decode()}")
        return IMAGE_MARK
    return str(part.get("text", ""))


def to_template_messages(messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> tuple[Message, ...]:
    """Messages for a chat template, with each image in its place."""
    remaining = iter(images)
    return tuple({**message, "content": _text_to_parts(message.get("content"), remaining)} for message in messages)


def _text_to_parts(content: Any, images: Iterator[Any]) -> Any:
    if not isinstance(content, str) or IMAGE_MARK not in content:
        return content
    first, *others = content.split(IMAGE_MARK)
    parts = [{"type": "text", "text": first}]
    for text in others:
        image = next(images, None)
        parts.append({"type": "text", "text": IMAGE_MARK} if image is None else {"type": "image", "image": image})
        parts.append({"type": "text", "text": text})
    return [part for part in parts if part.get("text") != ""]


def drop_empty_turns(messages: Sequence[dict[str, Any]]) -> Messages:
    """The chat without empty assistant messages at its end, which mean that the turn before them continues."""
    chat = list(messages)
    while chat and chat[-1].get("role") == "assistant" and not chat[-1].get("content"):
        chat.pop()
    return chat


def split_open_turn(messages: Sequence[dict[str, Any]]) -> tuple[Messages, str]:
    """The chat without a final assistant message, and the text of that message, which the policy continues."""
    chat = drop_empty_turns(messages)
    if chat and chat[-1].get("role") == "assistant":
        return chat[:-1], str(chat[-1]["content"])
    return chat, ""


@dataclass(frozen=True)
class ChatState:
    """The chat as the scheduler left it, and the policy's turn since then."""

    chat: Messages
    images: int
    prefix: str = ""
    """The text of the turn that was there before the policy's."""
    text: str = ""
    ids: tuple[int, ...] = ()
    """The ids of `said`, without an end token."""

    @property
    def turn(self) -> str:
        return self.prefix + self.text

    @property
    def whole(self) -> Messages:
        return [*deepcopy(self.chat), {"role": "assistant", "content": self.turn}]


def start_history(request: RolloutInferRequest) -> tuple[ChatState, Step]:
    """A step that replaces the history by the chat of the request."""
    chat, prefix = split_open_turn(request.messages)
    step = Step(history=to_template_messages(chat, request.images), insert=prefix)
    return ChatState(deepcopy(chat), len(request.images), prefix), step


def next_step(
    state: ChatState, request: RolloutInferRequest, decode: Callable[[Sequence[int]], str]
) -> tuple[ChatState, Step]:
    """The next state and step, from the difference between the known chat and the scheduler's."""
    length = len(state.chat)
    chat = drop_empty_turns(request.messages)
    turn = chat[length].get("content") if len(chat) > length and chat[length].get("role") == "assistant" else None
    if chat[:length] != state.chat or not isinstance(turn, str):
        return start_history(request)
    rest = chat[length + 1 :]
    if not rest:
        return _continue_turn(state, turn, request, decode)
    new, prefix = split_open_turn(rest)
    if not new or turn.strip() != state.turn.strip():
        return start_history(request)
    step = Step(messages=to_template_messages(new, request.images[state.images :]), insert=prefix)
    return ChatState(deepcopy([*chat[: length + 1], *new]), len(request.images), prefix), step


def _continue_turn(
    state: ChatState, turn: str, request: RolloutInferRequest, decode: Callable[[Sequence[int]], str]
) -> tuple[ChatState, Step]:
    if not turn.startswith(state.prefix):
        return start_history(request)
    after = turn.removeprefix(state.prefix)
    count = _count_kept_ids(state, after, decode)
    insert = after[len(decode(state.ids[:count])) :] if count else after
    return ChatState(state.chat, len(request.images), turn), Step(author=Author.FEEDBACK, insert=insert, keep_ids=count)


def _count_kept_ids(state: ChatState, after: str, decode: Callable[[Sequence[int]], str]) -> int:
    """The number of leading ids whose text is a prefix of `after`."""
    if after.startswith(state.text):
        return len(state.ids)
    low, high = 0, len(state.ids)
    while low < high:  # Bisects for the most ids whose text is not longer than `after`.
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(decode(state.ids[:middle])) <= len(after) else (low, middle - 1)
    while low and not after.startswith(decode(state.ids[:low])):
        low -= 1
    return low


def find_masked_spans(
    turns: Sequence[tuple[int, ...]], returned: Sequence[tuple[int, bool]], ends: frozenset[int]
) -> list[list[tuple[int, int]]]:
    """The spans of ids in each policy turn that a scheduler's loss mask excludes from training.

    Returned ids that the policy did not write are skipped; a turn that is not returned is trained.
    """
    ids, position = [id for id, _ in returned], 0
    masked: list[list[tuple[int, int]]] = []
    for turn in turns:
        text = turn[:-1] if turn and turn[-1] in ends else turn
        start = _find_ids(ids, text, position)
        if start is None or not text:
            masked.append([])
            continue
        position = start + len(text)
        masks = [mask for _, mask in returned[start:position]]
        if len(turn) > len(text):  # An end token that is not returned has the mask of the token before.
            masks.append(returned[position][1] if position < len(ids) and ids[position] == turn[-1] else masks[-1])
        masked.append(_masked_spans(masks))
    return masked


def _find_ids(ids: Sequence[int], text: Sequence[int], start: int) -> int | None:
    length = len(text)
    starts = range(start, len(ids) - length + 1)
    return next((index for index in starts if tuple(ids[index : index + length]) == tuple(text)), None)


def _masked_spans(masks: Sequence[bool]) -> list[tuple[int, int]]:
    spans, start = [], 0
    for is_trained, run in groupby(masks):
        length = sum(1 for _ in run)
        if not is_trained:
            spans.append((start, start + length))
        start += length
    return spans


_current: ContextVar[Trajectory] = ContextVar("the rollout of the running scheduler")


class Engine:
    """The `infer_engine` of schedulers, answered by the policy of the current rollout."""

    async def infer_async(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig | None = None, **kwargs: Any
    ) -> ChatCompletionResponse:
        return await _current.get().ask(infer_request, request_config)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None outside of a rollout."""
        current = _current.get(None)
        return None if current is None else current.opening.template.chat.hf_tokenizer


@dataclass
class _SchedulerResult:
    """The result of the scheduler's `run`."""

    outputs: list[RolloutOutput]
    error: SchedulerError | None = None


class Trajectory:
    """One rollout, from the scheduler's first request to the result of its `run`."""

    def __init__(self, scheduler: RolloutScheduler, opening: RolloutStart) -> None:
        self.scheduler, self.opening = scheduler, opening
        self.template = opening.template
        self.request = build_request(opening)
        self.config = build_request_config(opening)
        self.chat_state = ChatState([], 0)
        self.turns: list[tuple[int, ...]] = []
        """The ids of each of the policy's turns in the ledger."""
        self.ended: _SchedulerResult | None = None
        self._is_waiting = self._closed = False
        self._send_request, self._receive_request = anyio.create_memory_object_stream[
            RolloutInferRequest | _SchedulerResult
        ](1)
        self._send_response, self._receive_response = anyio.create_memory_object_stream[ChatCompletionResponse | None](
            1
        )

    async def __aenter__(self) -> tuple[Step, Trajectory]:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            self._tasks.start_soon(self._run)
            request = await self._receive_request.receive()
            if isinstance(request, _SchedulerResult):
                raise request.error or self._error("ended without a request to its engine")
            return self._first_step(request), self
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self._send_request, self._receive_request, self._send_response, self._receive_response):
            stream.close()
        self._tasks.cancel_scope.cancel()
        cancelled = kind is not None and issubclass(kind, anyio.get_cancelled_exc_class())
        await self._tasks.__aexit__(*((kind, error, trace) if cancelled else (None, None, None)))

    async def _run(self) -> None:
        _current.set(self)
        try:
            with UserCode():
                result = await await_user_code(self.scheduler.run(self.request, self.config))
            outputs = result if isinstance(result, list) else [result]
            if not all(isinstance(output, RolloutOutput) for output in outputs):
                raise self._error(f"returned {safe_repr(result)} instead of a RolloutOutput")
            outcome = _SchedulerResult(outputs)
        except RolloutEnded:
            outcome = _SchedulerResult([])
        except SchedulerError as error:
            outcome = _SchedulerResult([], error)
        except Exception as error:  # boundary: a scheduler is the user's own, and may raise anything
            outcome = _SchedulerResult([], SchedulerError(f"{self._name}: {describe_exception(error)}"))
        try:
            await self._send_request.send(outcome)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):  # The rollout has ended.
            return

    async def ask(self, request: RolloutInferRequest, config: RequestConfig | None) -> ChatCompletionResponse:
        """The policy's next turn; called by the scheduler's task."""
        await anyio.lowlevel.checkpoint()  # A scheduler in a loop must not block other rollouts.
        if self._is_waiting:
            raise self._error("requests two turns at once", "await one before the next: a rollout is one chat")
        if config is not None and config != self.config:
            raise self._error("changes its `request_config`", "set `sampling` and `limits` for the whole run")
        if self._closed:
            raise RolloutEnded
        self._is_waiting = True
        try:
            await self._send_request.send(request)
            answer = await self._receive_response.receive()
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream):
            answer = None
        finally:
            self._is_waiting = False
        if answer is None:
            self._closed = True
            raise RolloutEnded
        return answer

    def check_finished(self, turn: Turn) -> bool:
        """Always False: the scheduler ends the rollout in `step`."""
        return False

    async def step(self, turn: Turn) -> Step:
        request = await self._send_turn(turn)
        if isinstance(request, _SchedulerResult):
            if request.error is not None:
                raise request.error
            return Step(stop=StopReason.STEP_DONE, source=self._name)
        self.chat_state, step = next_step(self.chat_state, request, self.template.tokenizer.decode)
        if step.keep_ids is not None:
            self.turns[-1] = self.turns[-1][: step.keep_ids]
        return replace(step, source=self._name)

    async def finish(self, turn: Turn | None, why: StopReason) -> RolloutEnd:
        """Gives the scheduler the last turn, and returns its infos and masked spans."""
        if self.ended is None and turn is not None:
            await self._send_turn(turn)
        if self.ended is None:
            await self._send_response.send(None)
            await self._next_request()
        outcome = self.ended or _SchedulerResult([])
        if outcome.error is not None:
            raise outcome.error
        infos: dict[str, Any] = {}
        for output in outcome.outputs:
            infos |= to_plain(output.rollout_infos)
        chat = outcome.outputs[-1].messages if outcome.outputs else None
        returned = [pair for output in outcome.outputs for pair in output.ids_and_masks]
        spans = find_masked_spans(self.turns, returned, frozenset(self.template.stop_ids))
        return RolloutEnd({**infos, CHAT_INFO: to_plain(chat or self.chat_state.whole)}, spans)

    def _first_step(self, request: RolloutInferRequest) -> Step:
        self.chat_state, step = start_history(request)
        first_request = build_request(self.opening)
        is_unchanged = (request.messages, request.images) == (first_request.messages, first_request.images)
        return replace(step, history=self.opening.task.messages) if is_unchanged else step

    async def _send_turn(self, turn: Turn) -> RolloutInferRequest | _SchedulerResult:
        """Sends the policy's turn to the scheduler, and returns its next request or result."""
        entry = turn.ledger.entries[-1]
        self.turns.append(entry.ids)
        ids = entry.ids[:-1] if self.template.is_turn_ended(entry.ids) else entry.ids
        text = self.template.tokenizer.decode(ids)
        continues = bool(self.chat_state.prefix)
        prefix = self.chat_state.prefix or self.template.prefill
        self.chat_state = replace(self.chat_state, prefix=prefix, text=text, ids=ids)
        content = text if continues else prefix + text
        await self._send_response.send(_build_response(turn, entry, content))
        return await self._next_request()

    async def _next_request(self) -> RolloutInferRequest | _SchedulerResult:
        request = await self._receive_request.receive()
        if isinstance(request, _SchedulerResult):
            self.ended = request
        return request

    @property
    def _name(self) -> str:
        return type(self.scheduler).__name__

    def _error(self, problem: str, remedy: str = "see `run`") -> SchedulerError:
        code: Any = getattr(type(self.scheduler).run, "__code__", None)
        place = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
        return SchedulerError(f"{place}{self._name} {problem}; {remedy}")


def _build_response(turn: Turn, entry: Entry, content: str) -> ChatCompletionResponse:
    stop = "length" if entry.finish_reason == "length" else "stop"
    logprobs = {"content": [{"logprob": logprob} for logprob in entry.logprobs or ()]}
    message = ChatMessage("assistant", content)
    choice = ChatCompletionResponseChoice(0, message, stop, logprobs, list(entry.ids))
    before = len(turn.ledger) - len(entry.ids)
    usage = UsageInfo(before, len(entry.ids), len(turn.ledger))
    return ChatCompletionResponse("policy", [choice], usage, prompt_token_ids=list(turn.ledger.ids[:before]))


class SchedulerStepper:
    """A stepper that begins a `Trajectory` for each rollout, which calls the scheduler."""

    def __init__(self, scheduler: RolloutScheduler) -> None:
        self.scheduler = scheduler
        if scheduler.__dict__.get("infer_engine") is None:
            scheduler.infer_engine = Engine()

    def begin(self, opening: RolloutStart) -> Trajectory:
        return Trajectory(self.scheduler, opening)

    def check_finished(self, turn: Turn) -> bool:
        return False

    def step(self, turn: Turn) -> Step:
        raise NotImplementedError("call `begin` for each rollout")


def make_swift_stepper(plugin: Any, options: Mapping[str, Any]) -> SchedulerStepper | None:
    """The stepper for a scheduler's class or object; None for anything else."""
    if isinstance(plugin, RolloutScheduler) or (isinstance(plugin, type) and issubclass(plugin, RolloutScheduler)):
        return wrap_scheduler(plugin, **options)
    is_plain = not isinstance(plugin, type) and not options and takes_requests(plugin)
    return wrap_plain_scheduler(plugin) if is_plain else None


def wrap_scheduler(plugin: Any, field: str = "stepper", **options: Any) -> SchedulerStepper:
    """The stepper for a scheduler class or object."""
    scheduler = instantiate(plugin, field, infer_engine=Engine(), **options)
    if not isinstance(scheduler, RolloutScheduler):
        if takes_requests(scheduler):
            return wrap_plain_scheduler(scheduler, field)
        problem = f"{plugin!r:.80} is not a scheduler"
        raise ConfigError(problem, field=field, remedy="derive it from MultiTurnScheduler")
    return SchedulerStepper(scheduler)


class _PlainScheduler(MultiTurnScheduler):
    """A scheduler that has `step` and perhaps `check_finished`, but is not derived from our base class."""

    def __init__(self, plugin: Any, infer_engine: Any) -> None:
        super().__init__(infer_engine, getattr(plugin, "max_turns", None))
        self.step = plugin.step  # type: ignore[method-assign]
        if hasattr(plugin, "check_finished"):
            self.check_finished = plugin.check_finished  # type: ignore[method-assign]


def takes_requests(plugin: Any) -> bool:
    """Whether the plug-in's `step` has a scheduler's parameters: the request, the result and the turn's number."""
    try:
        inspect.signature(plugin.step).bind(None, None, 1)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def wrap_plain_scheduler(plugin: Any, field: str = "stepper") -> SchedulerStepper:
    """The stepper for a scheduler on a base class of its own, as in ms-swift's documentation."""
    if hasattr(plugin, "check_finished"):
        try:
            inspect.signature(plugin.check_finished).bind(None, None, 1)
        except TypeError as error:
            code = inspect.unwrap(plugin.check_finished).__code__
            remedy = "define check_finished(self, infer_request, result, current_turn), like `step`"
            raise ConfigError(
                f"{type(plugin).__name__}.check_finished {error}",
                file=f"{code.co_filename}:{code.co_firstlineno}",
                field=field,
                remedy=remedy,
            ) from error
    return SchedulerStepper(_PlainScheduler(plugin, Engine()))


def named(name: str, plugins: str | Sequence[str] = (), **options: Any) -> Any:
    """The stepper for a scheduler that a plug-in file registers in `multi_turns`."""
    files = load_plugin_files(plugins, "stepper_args.plugins")
    plugin = find_registered(multi_turns, name, "stepper_args.name", "scheduler", files)
    return wrap_scheduler(plugin, "stepper_args.name", **options)
