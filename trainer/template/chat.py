"""A chat template is somebody else's program: it is asked for text, and believed only as far as it was tried."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from gateway.types import ToolSpec
from trainer.ledger import Message

from .errors import TemplateError
from .known import Known, Same
from .tokens import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Tool = ToolSpec | Mapping[str, Any]
"""A tool as a gateway gives it, or as an OpenAI function schema."""
MARK = "Mark7f3a"
"""Stands at the end of the fixed base's last turn, so that what follows it can be found."""
_MEANT = frozenset({"system", "developer", "assistant"})
"""Roles whose markup is meant; what users and tools say is text throughout."""


@dataclass(frozen=True, slots=True)
class Follow:
    """What a template writes after the body of a policy's turn."""

    closing: str
    """Before the end-of-turn token: white space, mostly."""
    end: str
    """The end-of-turn token, or nothing."""
    rest: str
    """The new messages and the generation prompt."""


class Chat:
    """The template of one tokenizer as a function from messages to text (fenced, see `tokens`)."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, tokens: Tokens, template: str | None, settings: Mapping[str, Any]
    ) -> None:
        self.tokenizer, self.tokens, self._template, self._settings = tokenizer, tokens, template, dict(settings)
        self._known: Known[bytes, str] = Known()
        # Every rollout offers the same tools, and a server may bring hundreds.
        self._named: Same[ToolSpec, str] = Same(lambda tool: json.dumps(schema(tool)))
        self._fenced: Same[ToolSpec, Any] = Same(lambda tool: tokens.fenced(schema(tool)))

    @cached_property
    def _timed(self) -> bool:
        """Whether it looks at a clock, and so may write another text for the same messages."""
        return "strftime_now" in self.source

    @cached_property
    def source(self) -> str:
        """The template's own text; of several, the one for tools."""
        return str(self.tokenizer.get_chat_template(self._template, tools=[{}]))

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, prompt: bool = False) -> str:
        def make() -> str:
            return self._text(messages, tools, prompt, self._objects)

        try:
            asked = "\n".join((json.dumps([messages, prompt]), *map(self._name, tools)))
        except TypeError:  # something that is no JSON, which only the template knows what to make of
            return make()
        return make() if self._timed else self._known.of(sha256(asked.encode()).digest(), make)

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], prompt: bool, objects: bool) -> str:
        rows = [self._row(message, objects) for message in messages]
        schemas = [self._schema(tool) for tool in tools]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    rows,
                    tools=schemas or None,
                    chat_template=self._template,
                    add_generation_prompt=prompt,
                    tokenize=False,
                    **self._settings,
                )
            )
        except Exception as error:  # the template is a program from a model's folder: it may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateError(f"the chat template refuses a conversation of {roles}: {error}") from error

    def _name(self, tool: Tool) -> str:
        return self._named.of(tool) if isinstance(tool, ToolSpec) else json.dumps(tool)

    def _schema(self, tool: Tool) -> Any:
        return self._fenced.of(tool) if isinstance(tool, ToolSpec) else self.tokens.fenced(tool)

    def _row(self, message: Message, objects: bool) -> dict[str, Any]:
        row = {key: value for key, value in message.items() if key not in ("role", "tool_calls")}
        row = self.tokens.fenced(row, markup=message["role"] in _MEANT)
        calls = [_call(call, objects) for call in message.get("tool_calls") or ()]
        if calls:
            row["tool_calls"] = self.tokens.fenced(calls, markup=True)
        return {"role": message["role"], **row}

    @cached_property
    def _objects(self) -> bool:
        """Whether the template takes a call's arguments as an object: most do, some join the text as it is."""
        turns = [_USER, _asking([("call00000", "probe")])]
        for objects in (True, False):
            try:
                written = self._text(turns, (), False, objects)
            except TemplateError:
                continue
            if f"'{MARK}'" not in written:  # an object printed as Python would print it
                return objects
        return True

    def follow(self, after: Sequence[Message], stops: Sequence[str]) -> Follow:
        """What stands after a turn, taken from a short fixed conversation: the history does not matter."""
        if after and after[0]["role"] == "tool":
            written = self._answered(after)
            at, end = self.tokens.first(written, stops)
            if not end:
                raise TemplateError(
                    "no stop id is known that ends a turn with calls",
                    "name it in `eos_token_id` of the model's generation_config.json",
                )
            return Follow("", end, written[at + len(end) :])
        written = _since(MARK, self.text([_USER, _SAID, *after], prompt=bool(after)))
        at, end = self.tokens.first(written, self.tokens.special)
        if end in stops or (end and self._closes):
            return Follow(written[:at], end, written[at + len(end) :])
        return Follow("", "", written)

    @cached_property
    def _closes(self) -> bool:
        """Whether a turn has an end of its own; otherwise the first token after it belongs to the next turn."""
        return bool(self.tokens.last_special(self.closing(called=False)))

    @cached_property
    def calls(self) -> bool:
        """Whether it writes calls at all; one that refuses them, or replies to them, says so itself."""
        reply: Message = {"role": "tool", "content": "x", "name": "probe", "tool_call_id": "call00000"}
        try:
            return MARK in self.text([_USER, _asking([("call00000", "probe")]), reply], [ToolSpec("probe")])
        except TemplateError:
            return True

    def _answered(self, after: Sequence[Message]) -> str:
        """What stands after the calls to which these are replies."""
        replies = [message for message in after if message["role"] == "tool"]
        asked = [(str(one.get("tool_call_id", "call00000")), str(one.get("name", "probe"))) for one in replies]
        tools = [ToolSpec(name) for name in dict.fromkeys(name for _, name in asked)]
        mark = MARK
        while any(mark in text for pair in asked for text in pair):  # for the policy chose these words
            mark += "a"
        try:
            return _since(mark, self.text([_USER, _asking(asked, mark), *after], tools, prompt=True))
        except TemplateError:
            if len(asked) == 1:
                raise
            # Some templates refuse several calls in a turn, and still write several replies.
            return _since(mark, self.text([_USER, _asking(asked[-1:], mark), *after], tools, prompt=True))

    def closing(self, *, called: bool) -> str:
        """What the template writes after the body of a conversation's last turn."""
        turn = _asking([("call00000", "probe")]) if called else _SAID
        return self.text([_USER, turn], [ToolSpec("probe")] if called else ()).partition(MARK)[2]

    def clocked(self, after: Sequence[Message], stops: Sequence[str]) -> bool:
        """Whether the time of rendering stands in what follows a turn: a stopped clock would show there."""
        stopped = "{%- macro strftime_now(format) -%}Clock7f3a{%- endmacro -%}" + self.source
        return "Clock7f3a" in Chat(self.tokenizer, self.tokens, stopped, self._settings).follow(after, stops).rest

    @cached_property
    def prompt(self) -> str:
        """The generation prompt."""
        bare, asked = self.text([_USER]), self.text([_USER], prompt=True)
        return asked.removeprefix(bare) if asked.startswith(bare) else ""


_USER: Message = {"role": "user", "content": "Question"}
_SAID: Message = {"role": "assistant", "content": MARK}


def _since(mark: str, text: str) -> str:
    _, found, rest = text.partition(mark)
    if not found:
        raise TemplateError("the chat template does not write the assistant's turn", "use another `chat_template`")
    return rest


def _asking(calls: Sequence[tuple[str, str]], mark: str = MARK) -> Message:
    """A turn that makes these calls, given by id and name; the mark stands in the last."""
    words = ["word"] * (len(calls) - 1) + [mark]
    rows = [called(id, name, json.dumps({"word": word})) for (id, name), word in zip(calls, words, strict=True)]
    return {"role": "assistant", "content": "", "tool_calls": rows}


def called(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def schema(tool: Tool) -> Mapping[str, Any]:
    """The OpenAI function schema of a tool, which is what templates take."""
    if not isinstance(tool, ToolSpec):
        return tool
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _call(call: Mapping[str, Any], objects: bool) -> dict[str, Any]:
    function = dict(call["function"])
    if objects and isinstance(function.get("arguments"), str):
        try:
            value = json.loads(function["arguments"] or "{}")
        except ValueError:  # the policy's own words, which are no JSON: they stay as they are
            value = None
        if isinstance(value, dict):
            function["arguments"] = value
    return {**call, "function": function}
