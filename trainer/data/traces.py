"""Reads traces for SFT: conversations with the assistant's turns, as rows of data or as the rollouts of a run.

Rows have `messages` (with `tools` and `tool_calls`), `prompt` and `completion`, or ShareGPT's `conversations`.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gateway.config.diagnostics import closest_match
from gateway.errors import ConfigError, ConfigErrors
from gateway.types import Outcome, ToolSpec
from gateway.types import Task as SessionTask
from trainer.data.dataset import RowSource, open_rows
from trainer.data.row_media import Row, RowMedia
from trainer.data.tasks import MAX_ROW_ERRORS, LazyTasks, require_valid
from trainer.ledger import BRANCH, OFFERED, Author, Ledger, Message
from trainer.rollout.rollout import Rollout
from trainer.rollout.settings import BaseRolloutSettings
from trainer.rollout.task import Task
from trainer.storage.rollout_file import ROLLOUTS_FILE, Rollouts
from trainer.template.chat_template import build_call

SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "observation": "tool", "tool": "tool", "function_call": "function_call",
}  # fmt: skip
ROLES = ("system", "developer", "user", "assistant", "tool")
FORMATS = "`messages`, `prompt` and `completion`, or `conversations`"
SYSTEM_ROLES = ("system", "developer")
Report = Callable[[str, str, str], None]
"""Takes the field, the problem and the remedy."""


WEIGHT = "weight"
"""The key of an assistant's message that says whether it is trained (1, the default) or only read (0)."""


@dataclass(frozen=True, slots=True)
class TraceTask(Task):
    """A task with the turns that are to be learned."""

    rest: tuple[Message, ...] = ()
    """The messages after the opening ones, from the first turn of the assistant that is trained to the last."""
    tools: tuple[ToolSpec, ...] | None = None
    """The tools that the trace offers; by default those of the run that are named in `session_task`."""
    recorded: tuple[tuple[int, ...], ...] = ()
    """The ids of each turn as a policy sampled them; they are kept if this template reads the same turn from them."""

    @property
    def turns(self) -> tuple[Message, ...]:
        """The assistant's messages."""
        return tuple(message for message in self.rest if message["role"] == "assistant")

    def offered(self, specs: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
        """The tools that it offers, where the run has `specs`."""
        if self.tools is not None:
            return self.tools
        names = self.session_task.tools
        return tuple(spec for spec in specs if spec.audience == "policy" and (names is None or spec.name in names))


def load_traces(settings: BaseRolloutSettings, name: str, options: TraceOptions) -> LazyTasks:
    """The traces of a file, a data set or a run's folder. Raises ConfigErrors with all rows that cannot be learned."""
    folder = Path(name)
    if (folder / ROLLOUTS_FILE).is_file():
        return RunTraces(folder, options)
    if options.where or options.drop_examples:
        field = "where" if options.where else "drop_examples"
        problem = "is for the rollouts of a run, which know their rewards and their examples"
        raise ConfigError(problem, field=f"sft.{field}", remedy="name a run's folder, or leave it out")
    rows = open_rows(name, "train")
    return RowTraces(rows, RowMedia(settings.columns, rows.folder), settings.system, options)


class TraceOptions(NamedTuple):
    """What is changed about traces before they are learned."""

    where: str = ""
    system: str | None = None
    drop_examples: bool = False


class RowTraces(LazyTasks):
    """Rows of data as traces; all are checked at the start, and each is read again when it is drawn."""

    def __init__(self, rows: RowSource, media: RowMedia, system: str, options: TraceOptions) -> None:
        self._rows, self._media, self._system, self._options = rows, media, system, options
        require_valid(rows, self._read)

    def __len__(self) -> int:
        return len(self._rows)

    def _read(self, number: int) -> Task:
        location = self._rows.location(number)
        task = read_trace(self._rows[number], location, self._media, self._system)
        return replace(_change(task, self._options), id=f"trace-{number + 1}")


def read_trace(row: Row, location: str, media: RowMedia, system: str = "") -> TraceTask:
    """The trace of a row. Raises ConfigErrors with everything that is wrong."""
    errors: list[ConfigError] = []

    def report(field: str, problem: str, remedy: str) -> None:
        errors.append(ConfigError(problem, file=location, field=field, remedy=remedy))

    field, chat = _read_chat(row, report)
    chat = media.insert_media(chat, row, report) if chat else []
    given = row.get("system")
    if chat and chat[0]["role"] not in SYSTEM_ROLES and (text := given if isinstance(given, str) else system):
        chat.insert(0, {"role": "system", "content": text})
    tools, names = _read_tools(row.get("tools"), report)
    trained = [index for index, message in enumerate(chat) if message["role"] == "assistant"]
    if chat and not trained:
        report(field, "has no turn of the assistant", "add one, or leave the row out")
    elif chat and not any(chat[index].get(WEIGHT, 1) for index in trained):
        report(field, "has no turn of the assistant with a weight", "leave `weight: 0` out of one")
    elif trained and not any(message["role"] not in SYSTEM_ROLES for message in chat[: trained[0]]):
        report(field, "has nothing before the assistant's first turn", "begin with the user's message")
    if errors:
        raise ConfigErrors(errors)
    opening, rest = chat[: trained[0]], chat[trained[0] : trained[-1] + 1]
    _refuse_adjacent_turns(trained, lambda index, *problem: report(f"{field}[{index}]", *problem))
    if errors:
        raise ConfigErrors(errors)
    session_task = SessionTask(tools=names)
    return TraceTask("", tuple(opening), None, session_task, row, location, rest=tuple(rest), tools=tools)


def _refuse_adjacent_turns(trained: Sequence[int], report: Callable[[int, str, str], None]) -> None:
    """Reports turns of the assistant with nothing between them: no policy writes two of them."""
    for index, following in pairwise(trained):
        if following == index + 1:
            remedy = 'join them, or add what is between them, such as {"role": "tool", "content": "..."}'
            report(following, "follows another turn of the assistant", remedy)


def _read_chat(row: Row, report: Report) -> tuple[str, list[dict[str, Any]]]:
    """The field and the messages of a row in any of the formats."""
    if row.get("completion") is not None:
        return "completion", [
            *_read_messages(row.get("prompt"), "prompt", "user", report),
            *_read_messages(row["completion"], "completion", "assistant", report),
        ]
    if row.get("conversations") is not None:
        return "conversations", _read_sharegpt(row["conversations"], report)
    if row.get("messages") is None:
        report("messages", "is missing", f"write {FORMATS}")
        return "messages", []
    return "messages", _read_messages(row["messages"], "messages", "", report)


def _read_messages(value: Any, field: str, role: str, report: Report) -> list[dict[str, Any]]:
    """Messages with calls in one form; a text is one message of the role."""
    if isinstance(value, str) and role and value.strip():
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        report(field, "is no list of messages", 'write [{"role": "user", "content": "..."}, ...]')
        return []
    return link_results([_read_message(f"{field}[{number}]", item, report) for number, item in enumerate(value)])


def _read_message(field: str, value: Any, report: Report) -> dict[str, Any]:
    message = {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else {}
    if message.get("role") not in ROLES:
        report(f"{field}.role", f"is {message.get('role')!r:.40}", f"write one of {', '.join(ROLES)}")
        return {"role": "user", "content": "?"}
    if WEIGHT in message and message[WEIGHT] not in (0, 1):
        report(f"{field}.{WEIGHT}", f"is {message[WEIGHT]!r:.40}", "write 0 for a turn that is only read, or 1")
    calls = message.pop("tool_calls", None) or []
    if not isinstance(calls, list):
        report(f"{field}.tool_calls", "is no list of calls", 'write [{"function": {"name": "...", "arguments": {}}}]')
        calls = []
    content = message.setdefault("content", "")
    parts = content if isinstance(content, list) else []
    if not isinstance(content, str | list) or not all(isinstance(part, Mapping) for part in parts):
        report(f"{field}.content", "is neither a text nor a list of parts", 'write "..."')
    if calls:
        message["tool_calls"] = [_read_call(f"{field}.tool_calls[{n}]", call, report) for n, call in enumerate(calls)]
    elif message["role"] == "assistant" and not message["content"]:
        is_reasoning = bool(message.get("reasoning_content"))
        report(field, "is only reasoning" if is_reasoning else "is empty", "add an answer or a call after it")
    return message


def _read_call(field: str, value: Any, report: Report) -> dict[str, Any]:
    """A call with its arguments as text, whether they were an object or a text."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    function = function if isinstance(function, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments", "{}")
    if not (isinstance(name, str) and name):
        report(f"{field}.function.name", "is missing", 'write {"function": {"name": "...", "arguments": {...}}}')
        return build_call("", "?", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(_parse(text), dict):
        report(f"{field}.function.arguments", "are no JSON object", 'write {"name": value, ...}')
    return build_call(str(value.get("id") or ""), name, text)


def link_results(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, where calls without an id get one, and results without a call's id those of the calls in order."""
    waiting: list[str] = []
    for turn, message in enumerate(chat):
        if calls := message.get("tool_calls"):
            for index, call in enumerate(calls):
                call["id"] = call["id"] or f"call_{turn}_{index}"
            waiting = [call["id"] for call in calls]
        elif message["role"] == "tool" and waiting:
            id = waiting.pop(0)
            message.setdefault("tool_call_id", id)
    return chat


def _read_sharegpt(value: Any, report: Report) -> list[dict[str, Any]]:
    """Messages of ShareGPT: human, gpt, function_call and observation."""
    chat: list[dict[str, Any]] = []
    for number, item in enumerate(value if isinstance(value, list) else []):
        field = f"conversations[{number}]"
        role = SHAREGPT_ROLES.get(str(item.get("from", item.get("role")))) if isinstance(item, Mapping) else None
        text = item.get("value", item.get("content")) if role else None
        if role is None or not isinstance(text, str):
            report(field, "is no turn of ShareGPT", 'write {"from": "human", "value": "..."}')
        elif role == "function_call":
            called = _parse(text)
            calls = called if isinstance(called, list) else [called]
            message = _read_message(field, {"role": "assistant", "tool_calls": calls}, report)
            if chat and chat[-1]["role"] == "assistant":  # One turn, in parts: text and then calls, or several calls.
                chat[-1]["tool_calls"] = [*chat[-1].get("tool_calls", ()), *message.get("tool_calls", ())]
            else:
                chat.append(message)
        else:
            weight = {WEIGHT: item[WEIGHT]} if item.get(WEIGHT) is not None else {}
            chat.append(_read_message(field, {"role": role, "content": text, **weight}, report))
    if not chat:
        report("conversations", "has no turns", 'write [{"from": "human", "value": "..."}, ...]')
    return link_results(chat)


def _read_tools(value: Any, report: Report) -> tuple[tuple[ToolSpec, ...] | None, tuple[str, ...] | None]:
    """Schemas of tools, as a list or as JSON text; or names of tools of the run. None without the column."""
    if value is None:
        return None, None
    listed = _parse(value) if isinstance(value, str) and value.strip() else value or []
    listed = listed if isinstance(listed, list) else [None]
    if listed and all(isinstance(item, str) for item in listed):
        return None, tuple(listed)
    functions = [item.get("function", item) for item in listed if isinstance(item, Mapping)]
    empty = {"type": "object", "properties": {}}
    specs = [
        ToolSpec(
            f.get("name") or "",
            f.get("description") or "",
            next((f[key] for key in ("parameters", "inputSchema") if f.get(key) is not None), empty),
        )
        for f in functions
        if isinstance(f, Mapping)
    ]
    if len(specs) != len(listed) or not all(map(_is_tool, specs)):
        report("tools", "are no schemas of tools", 'write [{"type": "function", "function": {"name": ...}}], or names')
        return None, None
    names = [spec.name for spec in specs]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        report("tools", f"has two tools named {twice!r}", "leave one out")
    return tuple(specs), None


def _is_tool(spec: ToolSpec) -> bool:
    """Whether a tool of a row has a name, and parameters that may be a schema of its arguments."""
    schema = spec.parameters
    is_named = isinstance(spec.name, str) and bool(spec.name) and isinstance(spec.description, str)
    return is_named and isinstance(schema, Mapping) and isinstance(schema.get("properties"), Mapping | None)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _change(task: TraceTask, options: TraceOptions) -> TraceTask:
    """The trace with another system prompt, or without the examples before its question."""
    messages: Sequence[Message] = task.messages
    if options.drop_examples:
        question = max(number for number, message in enumerate(messages) if message["role"] == "user")
        messages = [*(message for message in messages[:1] if message["role"] in SYSTEM_ROLES), *messages[question:]]
    if options.system is not None:
        after = messages[1:] if messages and messages[0]["role"] in SYSTEM_ROLES else messages
        messages = [*([{"role": "system", "content": options.system}] if options.system else []), *after]
    return replace(task, messages=tuple(messages))


class RunTraces(LazyTasks):
    """The rollouts of a run as traces, with the ids that the policy sampled."""

    def __init__(self, folder: Path, options: TraceOptions) -> None:
        self._rollouts, self._options = Rollouts(folder), options
        self._folder = folder
        conditions, components = parse_where(options.where), set[str]()
        self._numbers: list[tuple[int, int]] = []
        """Rollouts that are wanted, and their ledgers: each is a trace, for each is what the policy saw."""
        for number, rollout in self._rollouts.numbered():
            components |= rollout.rewards.keys()
            if not rollout.stop.is_infrastructure and all(each.holds(rollout) for each in conditions):
                if options.drop_examples and rollout.earlier:
                    problem = f"rollout {number} has several histories, of which only the first begins with examples"
                    remedy = "leave `drop_examples` out, or such rollouts with `where`"
                    raise ConfigError(problem, file=folder, field="sft.drop_examples", remedy=remedy)
                ledgers = (index for index, ledger in enumerate(rollout.ledgers) if ledger.turns)
                self._numbers += [(number, index) for index in ledgers]
        for each in conditions:
            each.require_known(components)
        if not self._numbers:
            problem = f"has no rollout where {options.where}" if options.where else "has no rollout to learn from"
            raise ConfigError(problem, file=folder, field="sft.where", remedy="ask for less, or collect more")
        for number in range(len(self)):
            self._read(number)

    def __len__(self) -> int:
        return len(self._numbers)

    def _read(self, number: int) -> Task:
        place, index = self._numbers[number]
        rollout = self._rollouts[place]
        location = f"{self._folder / ROLLOUTS_FILE}:{place + 1}"
        task = _task_from_ledger(rollout, rollout.ledgers[index], location)
        return replace(_change(task, self._options), id=f"{rollout.task}-{place + 1}-{index}")


def _task_from_ledger(rollout: Rollout, ledger: Ledger, location: str) -> TraceTask:
    """The trace of a ledger. Raises ConfigError where its turns cannot be rendered from its messages."""
    entries = ledger.entries
    while entries and entries[-1].author is not Author.POLICY:
        entries = entries[:-1]
    turns = {index for index, one in enumerate(entries) if one.author is Author.POLICY or one.source == BRANCH}
    is_continued = any(len(entries[index].messages) != 1 for index in turns)
    if ledger.media_spans or is_continued or entries[0].author is not Author.TASK:
        problem = "has images, or turns that a plug-in continued, which cannot be rendered again"
        raise ConfigError(problem, file=location, field="sft", remedy="leave such rollouts out with `where`")
    rest: list[Message] = []
    recorded = []
    for index, entry in enumerate(entries[1:], 1):
        for message in entry.messages:
            is_turn = message["role"] == "assistant"
            if is_turn:
                recorded.append(entry.ids if index in turns else ())
            rest.append({**message, WEIGHT: 0} if is_turn and entry.author is not Author.POLICY else message)
    columns = {"kind": rollout.kind} if rollout.kind else {}
    tools, names = _read_tools(entries[0].info.get(OFFERED), lambda *_: None)
    return TraceTask(
        rollout.task,
        entries[0].messages,
        None,
        SessionTask(tools=names),
        columns,
        location,
        rest=tuple(rest),
        tools=tools,
        recorded=tuple(recorded),
    )


def _step_of(group: str) -> int | None:
    first = group.partition("-")[0]
    return int(first) if first.isdecimal() else None


TEXTS: Mapping[str, Callable[[Rollout], str]] = {
    "kind": lambda rollout: rollout.kind,
    "stop": lambda rollout: str(rollout.stop),
    "task": lambda rollout: rollout.task,
}
NUMBERS: Mapping[str, Callable[[Rollout], float | None]] = {
    "reward": lambda rollout: rollout.reward,
    "turns": lambda rollout: len(rollout.turns),
    "calls": lambda rollout: sum(len(turn.calls) for turn in rollout.turns),
    "invalid": lambda rollout: sum(
        outcome is Outcome.INVALID for ledger in rollout.ledgers for entry in ledger for outcome in entry.outcomes
    ),
    "tokens": lambda rollout: sum(map(len, rollout.ledgers)),
    "step": lambda rollout: rollout.step if rollout.step is not None else _step_of(rollout.group),
}
"""What conditions may ask of a rollout; other names are those of reward components."""
SIGNS = {">=": operator.ge, "<=": operator.le, "!=": operator.ne, "==": operator.eq, "=": operator.eq}
SIGNS |= {">": operator.gt, "<": operator.lt}
_CONDITION = re.compile(r"\s*([\w.]+)\s*(>=|<=|!=|==|=|>|<)\s*(\"[^\"]*\"|'[^']*'|\S+)\s*")


def parse_where(text: str) -> list[Condition]:
    """Conditions on rollouts, such as `reward >= 1 and calls > 0`."""
    return [_parse_condition(part) for part in re.split(r"\band\b", text)] if text.strip() else []


class Condition(NamedTuple):
    """A condition on rollouts."""

    name: str
    compare: Callable[[Any, Any], bool]
    value: str | float

    def holds(self, rollout: Rollout) -> bool:
        field = TEXTS.get(self.name) or NUMBERS.get(self.name) or (lambda rollout: rollout.rewards.get(self.name))
        found = field(rollout)
        return found is not None and self.compare(found, self.value)

    def require_known(self, components: Collection[str]) -> None:
        """Raises ConfigError unless the name is known, or that of a reward component."""
        known = [*NUMBERS, *TEXTS, *components]
        if self.name not in known:
            near = closest_match(self.name, known)
            remedy = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"rollouts have no {self.name!r}", field="sft.where", remedy=remedy)


def _parse_condition(text: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        fields = ", ".join([*NUMBERS, *TEXTS])
        remedy = f"write `reward >= 1 and calls > 0`; there are {fields}, and the run's reward components"
        raise ConfigError(f"{text.strip()!r:.80} is no condition", field="sft.where", remedy=remedy)
    name, word = match[1], match[3].strip("\"'")
    if name in TEXTS:
        return Condition(name, SIGNS[match[2]], word)
    try:
        return Condition(name, SIGNS[match[2]], float(word))
    except ValueError:
        problem = f"{name!r} is compared with {word!r:.40}, which is no number"
        raise ConfigError(problem, field="sft.where", remedy=f"write `{name} {match[2]} 0.5`") from None


def iterate_problems(traces: Sequence[Task], check: Callable[[TraceTask], None]) -> Iterator[ConfigError]:
    """The first problems that a check of each trace raises."""
    found = 0
    for task in traces:
        try:
            if isinstance(task, TraceTask):
                check(task)
        except ConfigError as error:
            found += 1
            yield error
            if found == MAX_ROW_ERRORS:
                return
