"""Reads rows as tasks: what their fields become (docs/reference/rows.md has all of them)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.config.diagnostics import closest_match
from gateway.errors import ConfigError, ConfigErrors
from gateway.line_file import parse_json_line
from gateway.media import MediaError
from gateway.state import MAX_NAME
from gateway.types import Task as SessionTask
from trainer.data.row_media import Row, RowMedia
from trainer.ledger import Message
from trainer.rollout.task import Task

PROMPT_COLUMNS = ("messages", "prompt", "question", "problem")
TRUTH_COLUMNS = ("reward_model.ground_truth", "ground_truth", "answer", "solution")
EXACT_TRUTH_COLUMNS = TRUTH_COLUMNS[:2]
"""The others may hold text around the answer, so that interactions do not get them."""
TOOL_COLUMNS = ("tools", "extra_info.tools", "extra_info.tool_selection")
AGENT_COLUMN = "agent_name"
VERL_COLUMNS = ("data_source", "reward_model")
"""Columns that mark a row for verl; only then is `agent_name` the name of verl's agent loop."""
MEANT_COLUMNS: Mapping[str, str] = {
    "input": "prompt", "query": "prompt", "instruction": "prompt", "user": "prompt", "task": "prompt", "text": "prompt",
    "conversation": "messages", "conversations": "messages", "chat": "messages", "history": "messages",
    "output": "answer", "response": "answer", "completion": "answer", "target": "answer", "label": "answer",
    "expected": "answer", "gold": "answer", "truth": "answer", "reference": "answer", "expected_answer": "answer",
}  # fmt: skip
"""Columns of other data sets and what they are called here, for rows that lack a prompt or a right answer."""


def name_meant_columns(row: Row, *names: str) -> str:
    """Which of a row's columns to rename to one of these, in words; empty if there is none."""
    pairs = {column: MEANT_COLUMNS.get(column.lower()) or closest_match(column, names) for column in row}
    renames = [f"`{column}` to `{name}`" for column, name in pairs.items() if name in names and column not in names]
    return f"rename the column {' and '.join(renames)}" if renames else ""


ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_METHODS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
"""Keys of `tools_kwargs`: arguments for each method of a tool."""
END_STATE = "end_state"
RESERVED_ARGUMENTS = ("instance_id", "messages")
"""Arguments that the gateway itself passes to an interaction."""


def row_to_task(row: Row, location: str, media: RowMedia, system: str = "") -> Task:
    """Converts a row. Raises ConfigErrors with everything that is wrong. `system` is for chats without a system
    message."""
    reader = _RowReader(row, location, media)
    messages = reader.read_messages(system)
    interaction, args = reader.read_interaction()
    truth = next((value for _, value in reader.find(*TRUTH_COLUMNS)), args.get("ground_truth"))
    for _, exact_truth in [*reader.find(*EXACT_TRUTH_COLUMNS)][:1] if interaction or args else ():
        args.setdefault("ground_truth", exact_truth)
    id, tools, create = reader.read_id(), reader.read_tools(), reader.read_create_arguments()
    state, hashes_state = reader.read_states()
    if reader.errors:
        raise ConfigErrors(reader.errors)
    session_task = SessionTask(id, tools, create, interaction, args, state=state, hash_state=hashes_state)
    return Task(id, messages, truth, session_task, row, location)


def read_json_chat(value: Any) -> list[Any] | None:
    """The messages in a text that is a chat as JSON, as tables hold them that were saved as CSV; None for others."""
    if not isinstance(value, str) or not value.lstrip().startswith("[") or '"role"' not in value:
        return None
    try:
        messages = parse_json_line(value)
    except ValueError:
        return None
    is_chat = isinstance(messages, list) and all(isinstance(item, Mapping) and "role" in item for item in messages)
    return messages if is_chat and messages else None


class _RowReader:
    """Reads a row's columns, and collects all errors, so that one edit can fix them."""

    def __init__(self, row: Row, location: str, media: RowMedia) -> None:
        self.row, self.location, self.media = row, location, media
        self.errors: list[ConfigError] = []

    def report(self, field: str, problem: str, remedy: str) -> None:
        self.errors.append(ConfigError(problem, file=self.location, field=field, remedy=remedy))

    def find(self, *fields: str) -> Iterator[tuple[str, Any]]:
        """The fields that are present, in this order; a null counts as missing."""
        for field in fields:
            value: Any = self.row
            for key in field.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None:
                yield field, value

    def read_mapping(self, column: str) -> tuple[str, dict[str, Any]]:
        """A column that holds a mapping, at the top or in `extra_info`."""
        for field, value in self.find(column, f"extra_info.{column}"):
            if isinstance(value, Mapping):
                return field, dict(value)
            self.report(field, f"is {_kind(value)}, not a mapping", "write names and values: {...}")
        return column, {}

    def read_id(self) -> str:
        for field, value in self.find("id"):
            if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
                return str(value)
            self.report(field, f"is {_kind(value)}, not a text or a number", "write one, or leave the column out")
        try:
            return self.media.make_id(self.row)
        except UnicodeError:
            self.report("", "holds half of a surrogate pair", "remove the truncated character")
        except MediaError as error:
            self.report("", f"holds an unusable image: {error}", "fix the image, or remove it")
        except RecursionError:
            self.report("", "is nested too deeply", "remove the nested column")
        return ""

    def read_messages(self, system: str) -> tuple[Message, ...]:
        for field, value in self.find(*PROMPT_COLUMNS):
            chat = self.media.insert_media(self._read_chat(field, value), self.row, self.report)
            for column, text in self.find("system"):
                if not isinstance(text, str):
                    self.report(column, f"is {_kind(text)}, not a text", "write a text, or leave the column out")
                system = text
            if system and chat and chat[0]["role"] not in ("system", "developer"):
                chat.insert(0, {"role": "system", "content": system})
            return tuple(chat)
        remedy = name_meant_columns(self.row, *PROMPT_COLUMNS, "answer")
        self.report("prompt", "is missing", remedy or "write `prompt`: a text, or chat messages")
        return ()

    def _read_chat(self, field: str, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, str | list):
            self.report(field, f"is {_kind(value)}, not a text or chat messages", 'write "..." or [{"role": ...}]')
            return []
        if not (value.strip() if isinstance(value, str) else value):
            self.report(field, "is empty", "write the prompt, or remove the row")
            return []
        if isinstance(value, str):
            if (messages := read_json_chat(value)) is None:
                return [{"role": "user", "content": value}]
            value = messages
        chat = [self._read_message(f"{field}[{index}]", message) for index, message in enumerate(value)]
        if chat[-1].get("role") == "assistant" and self.media.columns.drop_answer and len(chat) > 1:
            return chat[:-1]
        if chat[-1].get("role") == "assistant":
            remedy = "remove that message, or set `columns.drop_answer`; the right answer goes into `answer`"
            self.report(field, "ends with an assistant's turn, which the policy should write", remedy)
        return chat

    def _read_message(self, field: str, value: Any) -> dict[str, Any]:
        """A message without null values, with which tables fill missing keys."""
        if not isinstance(value, Mapping):
            self.report(field, f"is {_kind(value)}, not a message", 'write {"role": "user", "content": "..."}')
            return {"role": "user"}
        message = {key: item for key, item in value.items() if item is not None}
        role, content = message.setdefault("role", ""), message.get("content")
        if role not in ROLES:
            self.report(f"{field}.role", f"is {role!r:.40}", f"write one of {', '.join(ROLES)}")
        is_parts = isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") for part in content)
        if not (isinstance(content, str) or is_parts or (content is None and message.get("tool_calls"))):
            remedy = 'write a text, or parts: [{"type": "text", "text": "..."}]'
            self.report(f"{field}.content", f"is {_kind(content)}, not a text or a list of parts", remedy)
        elif role == "user" and not (content.strip() if isinstance(content, str) else content):
            self.report(f"{field}.content", "is empty", "write the user's message, or remove it")
        return message

    def read_tools(self) -> tuple[str, ...] | None:
        for _, agent in self.find(AGENT_COLUMN) if any(True for _ in self.find(*VERL_COLUMNS)) else ():
            if agent == "single_turn_agent":
                return ()
            if agent != "tool_agent":
                remedy = "write `tool_agent` or `single_turn_agent`; for other loops, set a plug-in as `stepper`"
                self.report(AGENT_COLUMN, f"is {agent!r:.60}, which is not a known agent loop", remedy)
        for field, value in self.find(*TOOL_COLUMNS):
            if isinstance(value, list) and all(isinstance(name, str) for name in value):
                return tuple(dict.fromkeys(value))
            remedy = 'write ["name", ...]; schemas of tools belong into the tool configuration'
            self.report(field, f"is {_kind(value)}, not a list of tool names", remedy)
        return None

    def read_create_arguments(self) -> dict[str, dict[str, Any]]:
        """The arguments of each tool's `create`; if a row has arguments for other methods too, by method."""
        field, tools = self.read_mapping("tools_kwargs")
        tools = {name: kwargs for name, kwargs in tools.items() if kwargs is not None}
        needed = self.find("need_tools_kwargs", "extra_info.need_tools_kwargs")
        if not tools and any(value is True for _, value in needed):
            self.report(field, "is missing, but `need_tools_kwargs` is true", "add it, or remove `need_tools_kwargs`")
        return {name: self._read_by_method(f"{field}.{name}", kwargs) for name, kwargs in tools.items()}

    def _read_by_method(self, field: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(
            isinstance(kwargs, Mapping | None) for kwargs in map(value.get, TOOL_METHODS)
        ):
            self.report(field, "is not a mapping with `create_kwargs`", 'write {"create_kwargs": {...}}')
            return {}
        for key in (key for key, item in value.items() if key not in TOOL_METHODS and item):
            self.report(f"{field}.{key}", "is passed to no tool", "put the tool's arguments into `create_kwargs`")
        by_method = {key: dict(value[key]) for key in TOOL_METHODS if value.get(key)}
        return by_method.get("create_kwargs", {}) if by_method.keys() <= {"create_kwargs"} else by_method

    def read_states(self) -> tuple[str, bool]:
        """The name of the prepared state, and whether the states at the end are compared."""
        name = self.row.get("state")
        end = self.row.get(END_STATE)
        is_mapping = isinstance(end, Mapping) and all(isinstance(value, str | None) for value in end.values())
        if end is not None and not is_mapping:
            remedy = 'write {"server": "sha256:..."}, or the path of a folder in place of the hash'
            self.report(END_STATE, f"is {_kind(end)}, not a mapping of texts", remedy)
        return name if isinstance(name, str) and len(name) <= MAX_NAME else "", end is not None

    def read_interaction(self) -> tuple[str | None, dict[str, Any]]:
        """The interaction's name and arguments. Without a name, the gateway uses `gsm8k`, or its only one."""
        field, args = self.read_mapping("interaction_kwargs")
        name = args.pop("name", None)
        if name is not None and not (isinstance(name, str) and name):
            self.report(f"{field}.name", f"is {_kind(name)}, not a text", "write the interaction's name")
            name = None
        for key in RESERVED_ARGUMENTS:
            if key in args:
                self.report(f"{field}.{key}", "is an argument of the gateway", "give this argument another name")
        return name, args


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "a text" if value.strip() else "an empty text"
    kinds = {list: "a list", dict: "a mapping", type(None): "nothing", bool: "a boolean", bytes: "bytes"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")
