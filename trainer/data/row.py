"""One row is read strictly: a column that has our name has our shape, and every other column passes untouched.

prompt   `messages`, `prompt`, `question` or `problem`: a text, or chat messages; `system` goes before it
truth    `reward_model.ground_truth`, `ground_truth`, `answer` or `solution`, else the interaction's `ground_truth`
asked    `tools` (names), `tools_kwargs` ({tool: {create_kwargs: {...}}}, and `execute_kwargs` and so on),
         `interaction_kwargs` (`name` chooses), at the top or in `extra_info`, where `tools` may be called
         `tool_selection`; an interaction without a `ground_truth` of its own has the row's
loop     `agent_name` of a row that verl would score: its `tool_agent`, or its `single_turn_agent`, which has no tools
shown    `images` and `videos`, each in its place among the messages: see `shown.py`
id       `id`, or else made from the row

Of several names for one thing, the first that is there counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.config.mistakes import nearest
from gateway.errors import ConfigError, ConfigErrors
from gateway.media import MediaError
from gateway.types import Task as Asked
from trainer.data.plain import Row, row_id
from trainer.data.shown import Shown
from trainer.ledger import Message
from trainer.task import Task

PROMPT = ("messages", "prompt", "question", "problem")
TRUTH = ("reward_model.ground_truth", "ground_truth", "answer", "solution")
EXACT = TRUTH[:2]
"""The others may hold a text around the answer."""
TOOLS = ("tools", "extra_info.tools", "extra_info.tool_selection")
LOOP = "agent_name"
VERLS = ("data_source", "reward_model")
"""With one of these columns, an agent's name is that of verl's loop, and not a column of somebody else's."""
ROLES = ("system", "developer", "user", "assistant", "tool")
METHODS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
"""Of a tool's methods, what each is given."""
TAKEN = ("instance_id", "messages")
"""What the gateway itself tells an interaction."""


def task_of(row: Row, place: str, shown: Shown, system: str = "") -> Task:
    """Raises ConfigErrors with everything that is wrong with the row. `system` is for chats that begin without."""
    reading = _Reading(row, place, shown)
    messages = reading.messages(system)
    name, args = reading.interaction()
    truth = next((value for _, value in reading.at(*TRUTH)), args.get("ground_truth"))
    for _, known in [*reading.at(*EXACT)][:1] if name or args else ():
        args.setdefault("ground_truth", known)
    id, tools, create = reading.id(), reading.tools(), reading.create()
    if reading.mistakes:
        raise ConfigErrors(reading.mistakes)
    return Task(id, messages, truth, Asked(id, tools, create, name, args), row, place)


class _Reading:
    """What is wrong is noted, and reading goes on: one edit mends it all."""

    def __init__(self, row: Row, place: str, shown: Shown) -> None:
        self.row, self.place, self.shown = row, place, shown
        self.mistakes: list[ConfigError] = []

    def wrong(self, field: str, problem: str, remedy: str) -> None:
        self.mistakes.append(ConfigError(problem, file=self.place, field=field, remedy=remedy))

    def at(self, *fields: str) -> Iterator[tuple[str, Any]]:
        """Those of the fields that are there, in this order; a null is not there."""
        for field in fields:
            value: Any = self.row
            for key in field.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None:
                yield field, value

    def mapping(self, column: str) -> tuple[str, dict[str, Any]]:
        """A column of names, which may stand in `extra_info`."""
        for field, value in self.at(column, f"extra_info.{column}"):
            if isinstance(value, Mapping):
                return field, dict(value)
            self.wrong(field, f"is {_kind(value)}, not a mapping", "write names and values: {...}")
        return column, {}

    def id(self) -> str:
        for field, value in self.at("id"):
            if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
                return str(value)
            self.wrong(field, f"is {_kind(value)}, not a text or a number", "write one, or leave the column out")
        try:
            return row_id(self.row)
        except UnicodeError:
            self.wrong("", "holds half of a surrogate pair", "leave out the character that was cut in two")
        except MediaError as error:
            self.wrong("", f"holds what is {error}", "mend the picture, or leave it out")
        except RecursionError:
            self.wrong("", "is nested too deeply", "leave out the column that is")
        return ""

    def messages(self, system: str) -> tuple[Message, ...]:
        for field, value in self.at(*PROMPT):
            chat = self.shown.fill(self._chat(field, value), self.row, self.wrong)
            for column, text in self.at("system"):
                if not isinstance(text, str):
                    self.wrong(column, f"is {_kind(text)}, not a text", "write a text, or leave the column out")
                system = text
            if system and chat and chat[0]["role"] not in ("system", "developer"):
                chat.insert(0, {"role": "system", "content": system})
            return tuple(chat)
        near = next((near for near in (nearest(column, PROMPT) for column in self.row) if near), None)
        remedy = f"did you mean `{near}`?" if near else "write `prompt`: a text, or chat messages"
        self.wrong("prompt", "is missing", remedy)
        return ()

    def _chat(self, field: str, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, str | list):
            self.wrong(field, f"is {_kind(value)}, not a text or chat messages", 'write "..." or [{"role": ...}]')
            return []
        if not (value.strip() if isinstance(value, str) else value):
            self.wrong(field, "is empty", "write what the policy is asked, or take the row out")
            return []
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        chat = [self._message(f"{field}[{place}]", message) for place, message in enumerate(value)]
        if chat[-1].get("role") == "assistant" and self.shown.columns.drop_answer and len(chat) > 1:
            return chat[:-1]
        if chat[-1].get("role") == "assistant":
            remedy = "take that message out; a right answer goes into `answer`"
            self.wrong(field, "ends with the assistant's turn, which is the policy's to write", remedy)
        return chat

    def _message(self, field: str, value: Any) -> dict[str, Any]:
        """Without the nulls with which tables fill their structs."""
        if not isinstance(value, Mapping):
            self.wrong(field, f"is {_kind(value)}, not a message", 'write {"role": "user", "content": "..."}')
            return {"role": "user"}
        message = {key: item for key, item in value.items() if item is not None}
        role, content = message.setdefault("role", ""), message.get("content")
        if role not in ROLES:
            self.wrong(f"{field}.role", f"is {role!r:.40}", f"write one of {', '.join(ROLES)}")
        parts = isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") for part in content)
        if not (isinstance(content, str) or parts or (content is None and message.get("tool_calls"))):
            remedy = 'write a text, or parts: [{"type": "text", "text": "..."}]'
            self.wrong(f"{field}.content", f"is {_kind(content)}, not a text or a list of parts", remedy)
        elif role == "user" and not (content.strip() if isinstance(content, str) else content):
            self.wrong(f"{field}.content", "is empty", "write what the user says, or take the message out")
        return message

    def tools(self) -> tuple[str, ...] | None:
        for _, loop in self.at(LOOP) if any(True for _ in self.at(*VERLS)) else ():
            if loop == "single_turn_agent":
                return ()
            if loop != "tool_agent":
                remedy = "write `tool_agent` or `single_turn_agent`; other loops are plug-ins: the setting `stepper`"
                self.wrong(LOOP, f"is {loop!r:.60}, a loop that is not here", remedy)
        for field, value in self.at(*TOOLS):
            if isinstance(value, list) and all(isinstance(name, str) for name in value):
                return tuple(dict.fromkeys(value))
            remedy = 'write ["name", ...]; what a tool takes is for the tool configuration to say'
            self.wrong(field, f"is {_kind(value)}, not a list of tool names", remedy)
        return None

    def create(self) -> dict[str, dict[str, Any]]:
        """By tool, what its `create` is given; as it stands, by method, where a row gives something to others too."""
        field, tools = self.mapping("tools_kwargs")
        tools = {name: kwargs for name, kwargs in tools.items() if kwargs is not None}
        if not tools and any(
            value is True for _, value in self.at("need_tools_kwargs", "extra_info.need_tools_kwargs")
        ):
            self.wrong(
                field, "is missing, and `need_tools_kwargs` is true", "write it, or take `need_tools_kwargs` out"
            )
        return {name: self._by_method(f"{field}.{name}", kwargs) for name, kwargs in tools.items()}

    def _by_method(self, field: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(
            isinstance(kwargs, Mapping | None) for kwargs in map(value.get, METHODS)
        ):
            self.wrong(field, "is no mapping with `create_kwargs`", 'write {"create_kwargs": {...}}')
            return {}
        for key in (key for key, item in value.items() if key not in METHODS and item):
            self.wrong(f"{field}.{key}", "reaches no tool", "put what the tool needs into `create_kwargs`")
        given = {key: dict(value[key]) for key in METHODS if value.get(key)}
        return given.get("create_kwargs", {}) if given.keys() <= {"create_kwargs"} else given

    def interaction(self) -> tuple[str | None, dict[str, Any]]:
        """Its name and its arguments. Without a name the gateway takes `gsm8k`, or the only one that it has."""
        field, args = self.mapping("interaction_kwargs")
        name = args.pop("name", None)
        if name is not None and not (isinstance(name, str) and name):
            self.wrong(f"{field}.name", f"is {_kind(name)}, not a text", "write the interaction's name")
            name = None
        for key in TAKEN:
            if key in args:
                self.wrong(f"{field}.{key}", "is the gateway's own", "give this argument another name")
        return name, args


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "a text" if value.strip() else "an empty text"
    kinds = {list: "a list", dict: "a mapping", type(None): "nothing", bool: "a truth value", bytes: "bytes"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")
