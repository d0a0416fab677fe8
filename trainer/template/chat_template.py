"""A model's chat template: renders messages to text, and finds out how the template ends turns and writes calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from gateway.types import ToolSpec
from trainer.ledger import Message
from trainer.template.errors import OTHER_TEMPLATE, TemplateError
from trainer.template.render_cache import IdentityCache, RenderCache
from trainer.template.text_calls import as_parts, write_calls_as_text
from trainer.template.tokenizer import FencedTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Tool = ToolSpec | Mapping[str, Any]
"""A tool of a gateway, or an OpenAI function schema."""
MARK = "Mark7f3a"
"""Ends the last turn of a fixed conversation, so that what follows the turn can be found."""
_FIRST_MARK = "First7f3a"
_MARKUP_ROLES = frozenset({"system", "developer", "assistant"})
"""Roles that may write markup; messages of users and tools are plain text."""


CallFormat = Literal["template", "text"]


@dataclass(frozen=True, slots=True)
class MessageForm:
    """The form in which a template takes messages."""

    objects: bool = True
    """A call's arguments as an object, like most, or as JSON text."""
    parts: bool = False
    """Content as a list of parts only: a text would be dropped."""


@dataclass(frozen=True, slots=True)
class TurnSuffix:
    """What a template writes after the body of a policy's turn."""

    closing: str
    """Text before the end token: mostly white space."""
    end: str
    """The end token; empty if there is none."""
    rest: str
    """The new messages and the generation prompt."""


class ChatTemplate:
    """One tokenizer's template as a function from messages to fenced text (see `tokenizer`)."""

    def __init__(
        self,
        hf_tokenizer: PreTrainedTokenizerFast,
        tokenizer: FencedTokenizer,
        template: str | None,
        kwargs: Mapping[str, Any],
        calls: CallFormat = "template",
    ) -> None:
        self.hf_tokenizer, self.tokenizer = hf_tokenizer, tokenizer
        self._template, self._kwargs = template, dict(kwargs)
        self.call_format = calls
        self._cache: RenderCache[bytes, str] = RenderCache()
        # All rollouts have the same tools, and a server may have hundreds.
        self._tool_json: IdentityCache[ToolSpec, str] = IdentityCache(lambda tool: json.dumps(function_schema(tool)))
        self._fenced_schema: IdentityCache[ToolSpec, Any] = IdentityCache(
            lambda tool: tokenizer.fence(function_schema(tool))
        )

    @cached_property
    def _uses_clock(self) -> bool:
        """Whether the same messages may render differently later."""
        return "strftime_now" in self.source

    @cached_property
    def source(self) -> str:
        """The template's source; if there are several, the one for tools."""
        return str(self.hf_tokenizer.get_chat_template(self._template, tools=[{}]))

    def require_valid_syntax(self) -> None:
        """Raises TemplateError with the line of a syntax error; whatever else a template does is found by using it."""
        from jinja2 import TemplateSyntaxError

        try:
            self.hf_tokenizer.apply_chat_template([dict(_USER_TURN)], chat_template=self._template, tokenize=False)
        except TemplateSyntaxError as error:
            problem = f"the chat template is no valid Jinja: line {error.lineno}: {error.message}"
            raise TemplateError(problem, "copy it again, or correct that line") from error
        except Exception:  # boundary: a template may refuse this conversation, and lacks its settings here
            return

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, add_generation_prompt: bool = False
    ) -> str:
        """The conversation as text, cached."""

        def render() -> str:
            return self._render(messages, tools, add_generation_prompt, self._form)

        try:
            key = "\n".join((json.dumps([messages, add_generation_prompt]), *map(self._tool_key, tools)))
        except TypeError:  # Not JSON: only the template knows what to do with it.
            return render()
        return render() if self._uses_clock else self._cache.get(sha256(key.encode()).digest(), render)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool], add_generation_prompt: bool, form: MessageForm
    ) -> str:
        fenced = [self._fence_message(message, form.objects) for message in messages]
        schemas = [self._schema(tool) for tool in tools]
        if self.call_format == "text":
            fenced, schemas = write_calls_as_text(fenced, schemas), []
        if form.parts:
            fenced = [message | {"content": as_parts(message.get("content") or "")} for message in fenced]
        try:
            return str(
                self.hf_tokenizer.apply_chat_template(
                    fenced,
                    tools=schemas or None,
                    chat_template=self._template,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **self._kwargs,
                )
            )
        except Exception as error:  # boundary: the template comes from a model's folder and may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateError(f"the chat template rejects a conversation of {roles}: {error}") from error

    def _tool_key(self, tool: Tool) -> str:
        return self._tool_json.get(tool) if isinstance(tool, ToolSpec) else json.dumps(tool)

    def _schema(self, tool: Tool) -> Any:
        return self._fenced_schema.get(tool) if isinstance(tool, ToolSpec) else self.tokenizer.fence(tool)

    def _fence_message(self, message: Message, objects: bool) -> dict[str, Any]:
        fields = {key: value for key, value in message.items() if key not in ("role", "tool_calls")}
        fields = self.tokenizer.fence(fields, markup=message["role"] in _MARKUP_ROLES)
        calls = [_convert_arguments(call, objects) for call in message.get("tool_calls") or ()]
        if calls:
            fields["tool_calls"] = self.tokenizer.fence(calls, markup=True)
        return {"role": message["role"], **fields}

    @cached_property
    def _form(self) -> MessageForm:
        """Found out by rendering a word in each form."""
        parts = not self._writes_mark([_USER_MARK], MessageForm()) and self._writes_mark(
            [_USER_MARK], MessageForm(parts=True)
        )
        turns = [_USER_TURN, _calling_turn([("call00000", "probe")])]
        for objects in (True, False):
            try:
                text = self._render(turns, (), False, MessageForm(objects, parts))
            except TemplateError:
                continue
            if f"'{MARK}'" not in text:  # An object printed as Python's repr.
                return MessageForm(objects, parts)
        return MessageForm(parts=parts)

    def _writes_mark(self, messages: Sequence[Message], form: MessageForm) -> bool:
        try:
            return MARK in self._render(messages, (), False, form)
        except TemplateError:
            return False

    def render_suffix(
        self, after: Sequence[Message], stop_tokens: Sequence[str], calls: Sequence[Mapping[str, Any]] = ()
    ) -> TurnSuffix:
        """What follows a turn, taken from a short fixed conversation, as it does not depend on the history.

        `calls` are the turn's own, as in its message; some templates write their names again beside the replies.
        """
        if after and after[0]["role"] == "tool":
            text = self._render_after_calls(after, calls)
            index, end = self.tokenizer.find_first(text, stop_tokens)
            if not end:
                raise TemplateError(
                    "no known stop id ends a turn with calls",
                    "add the id that ends it to `eos_token_id` in the model's generation_config.json",
                )
            return TurnSuffix("", end, text[index + len(end) :])
        text = _text_after(MARK, self.render([_USER_TURN, _TEXT_TURN, *after], add_generation_prompt=bool(after)))
        index, end = self.tokenizer.find_first(text, self.tokenizer.special_tokens)
        stop_index, stop = self.tokenizer.find_first(text, stop_tokens)
        if stop and self.tokenizer.is_blank(text[index:stop_index]):  # A mark may end the answer before the turn.
            index, end = stop_index, stop
        if end in stop_tokens or (end and self._has_end_token):
            return TurnSuffix(text[:index], end, text[index + len(end) :])
        return TurnSuffix("", "", text)

    @cached_property
    def _has_end_token(self) -> bool:
        """Whether a turn has an end token of its own; otherwise the next token belongs to the next turn."""
        return bool(self.tokenizer.find_last_special(self.render_closing(called=False)))

    @cached_property
    def writes_calls(self) -> bool:
        """Whether the template writes calls; True if it raises an error about them, which is reported elsewhere."""
        reply: Message = {"role": "tool", "content": "x", "name": "probe", "tool_call_id": "call00000"}
        turns = [_USER_TURN, _calling_turn([("call00000", "probe")])]
        for messages in ([*turns, reply], turns):  # Some templates reject replies, and drop calls.
            try:
                return MARK in self.render(messages, [ToolSpec("probe")])
            except TemplateError:
                continue
        return True

    @cached_property
    def writes_several_calls(self) -> bool:
        """Whether the template writes all calls of a turn; some reject a second one, or drop it silently."""
        calls = [("call00000", "probe"), ("call00001", "probe")]
        try:
            text = self.render([_USER_TURN, _calling_turn(calls, first=_FIRST_MARK)], [ToolSpec("probe")])
        except TemplateError:
            return False
        return MARK in text and _FIRST_MARK in text

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template takes a system message, or at least drops it without an error."""
        try:
            self.render([{"role": "system", "content": MARK}, _USER_TURN])
        except TemplateError:
            return False
        return True

    def _render_after_calls(self, after: Sequence[Message], made: Sequence[Mapping[str, Any]]) -> str:
        """What follows the calls to which these messages are replies."""
        replies = [message for message in after if message["role"] == "tool"]
        calls = [(str(call["id"]), str(call["function"]["name"])) for call in made] or [
            (str(reply.get("tool_call_id", "call00000")), str(reply.get("name", "probe"))) for reply in replies
        ]
        tools = [ToolSpec(name) for name in dict.fromkeys(name for _, name in calls)]
        mark = MARK
        while any(mark in text for call in calls for text in call):  # The policy chose these names.
            mark += "a"
        try:
            turns = [_USER_TURN, _calling_turn(calls, mark), *after]
            return _text_after(mark, self.render(turns, tools, add_generation_prompt=True))
        except TemplateError:
            if len(calls) == 1:
                raise
            # Some templates reject several calls in a turn, but accept several replies.
            turns = [_USER_TURN, _calling_turn(calls[:1], mark), *after]
            return _text_after(mark, self.render(turns, tools, add_generation_prompt=True))

    def render_closing(self, *, called: bool) -> str:
        """What the template writes after the body of a conversation's last turn, with calls or without."""
        turn = _calling_turn([("call00000", "probe")]) if called else _TEXT_TURN
        return self.render([_USER_TURN, turn], [ToolSpec("probe")] if called else ()).partition(MARK)[2]

    def writes_time(self, after: Sequence[Message], stop_tokens: Sequence[str]) -> bool:
        """Whether the time of rendering appears after a turn; tested with a clock that prints a known text."""
        fixed_clock = "{%- macro strftime_now(format) -%}Clock7f3a{%- endmacro -%}" + self.source
        template = ChatTemplate(self.hf_tokenizer, self.tokenizer, fixed_clock, self._kwargs, self.call_format)
        return "Clock7f3a" in template.render_suffix(after, stop_tokens).rest

    @cached_property
    def lead(self) -> str:
        """White space between the generation prompt and an answer's text."""
        prompt = self.render([_USER_TURN], add_generation_prompt=True)
        text = self.render([_USER_TURN, _TEXT_TURN]).partition(MARK)[0]
        lead = text.removeprefix(prompt) if text.startswith(prompt) else ""
        return "" if lead.strip() else lead

    @cached_property
    def generation_prompt(self) -> str:
        """The generation prompt."""
        without, text = self.render([_USER_TURN]), self.render([_USER_TURN], add_generation_prompt=True)
        return text.removeprefix(without) if text.startswith(without) else ""


_USER_TURN: Message = {"role": "user", "content": "Question"}
_USER_MARK: Message = {"role": "user", "content": MARK}
_TEXT_TURN: Message = {"role": "assistant", "content": MARK}


def _text_after(mark: str, text: str) -> str:
    _, found, rest = text.partition(mark)
    if not found:
        raise TemplateError("the chat template does not write the assistant's turn", OTHER_TEMPLATE)
    return rest


def _calling_turn(calls: Sequence[tuple[str, str]], mark: str = MARK, first: str = "word") -> Message:
    """A turn with these calls, given by id and name; the last call contains the mark."""
    words = [first] * (len(calls) - 1) + [mark]
    rows = [build_call(id, name, json.dumps({"word": word})) for (id, name), word in zip(calls, words, strict=True)]
    return {"role": "assistant", "content": "", "tool_calls": rows}


def build_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call as it stands in a chat message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_schema(tool: Tool) -> Mapping[str, Any]:
    """The OpenAI function schema of a tool, which templates take."""
    if not isinstance(tool, ToolSpec):
        return tool
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _convert_arguments(call: Mapping[str, Any], objects: bool) -> dict[str, Any]:
    """The call with its arguments parsed, if the template takes objects and they are a JSON object."""
    function = dict(call["function"])
    if objects and isinstance(function.get("arguments"), str):
        try:
            value = json.loads(function["arguments"] or "{}")
        except ValueError:  # The policy's text is not JSON and stays as it is.
            value = None
        if isinstance(value, dict):
            function["arguments"] = value
    return {**call, "function": function}
