"""Turns messages into token ids turn by turn, with the model's chat template; earlier ids are never encoded again."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from gateway.errors import ConfigError
from trainer.ledger import Entry, Ledger, Message
from trainer.parse.base import CallParser, Parser, Reply
from trainer.parse.choose import choose_parser, load_parser
from trainer.parse.hermes import Hermes
from trainer.parse.plain import Plain
from trainer.template.chat_template import CallFormat, ChatTemplate, Tool, build_call, function_schema
from trainer.template.errors import OTHER_TEMPLATE, TemplateError
from trainer.template.media_layout import MediaLayout, prepare_media
from trainer.template.tokenizer import FencedTokenizer, load_stop_ids, load_tokenizer, strip_fences
from trainer.vision.family import ImageLayout
from trainer.vision.image_processor import ImageProcessor, VisionError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

History = Literal["full", "inference_template"]
Sanity = Literal["strict", "ignore_strippable", "disable"]
_OPENING_TAG = re.compile(r"[<\[](\w+)[>\]]")
_NO_REASONING = re.compile(r"(?:[<\[](\w*think\w*)[>\]]\s*)?[<\[]/\w*think\w*[>\]]\s*\Z", re.IGNORECASE)
"""An empty block of reasoning, by which templates switch reasoning off; some write only its closing tag."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a template is used."""

    history: History = "full"
    """`full` keeps the policy's earlier reasoning, so that a rollout is one ledger. `inference_template` shows the
    policy what the template would at inference; if that drops reasoning, a new ledger starts."""
    sanity: Sanity = "strict"
    """Which differences the check at a rollout's end reports: all, all but white space, or none."""
    chat_template: str | None = None
    """A template to use instead of the one in the model's folder."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Arguments for the template, such as `enable_thinking`."""
    calls: CallFormat = "template"
    """How tools, calls and results are written: as the template does, or as text in Hermes' format, for templates that
    know none."""


class Template:
    """Encodes prompts and what follows a turn. Nothing else tokenizes; the policy's own ids are never re-encoded."""

    def __init__(
        self,
        chat: ChatTemplate,
        parser: Parser,
        stop_ids: Sequence[int],
        settings: Settings,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self.chat, self.tokenizer, self.parser, self.settings = chat, chat.tokenizer, parser, settings
        self.image_processor = image_processor
        """For a vision-language model."""
        names = {id: token for token, id in self.tokenizer.control_ids.items()}
        end_tokens = [self.tokenizer.find_last_special(chat.render_closing(called=False)), *_call_end_tokens(chat)]
        ids = dict.fromkeys([*stop_ids, *(self.tokenizer.control_ids[token] for token in end_tokens if token)])
        self.stop_ids: tuple[int, ...] = tuple(ids)
        """Ids that end a turn when sampled."""
        self.stop_tokens: tuple[str, ...] = tuple(names[id] for id in ids if id in names)
        suffix = chat.render_suffix([{"role": "user", "content": "Go on"}], self.stop_tokens)
        between, self.closing = suffix.end, strip_fences(suffix.closing).strip()
        self.end_tokens = tuple(dict.fromkeys([*self.stop_tokens, *([between] if between else [])]))
        """Tokens at the end of a turn, including those that do not stop sampling."""
        closing = chat.render_closing(called=False)
        self.lead = chat.lead
        """White space that the template writes before an answer, and the policy therefore, too."""
        self.end_count = max(1, sum(closing.count(end) for end in self.end_tokens))
        """How many of them the template writes after a conversation's last turn."""
        marks = [token for token in self.tokenizer.special_tokens if "think" not in token.lower()]
        self.prefill = _find_prefill(strip_fences(chat.generation_prompt), marks)
        """The start of the policy's turn that the generation prompt contains: `<think>`, or an empty block of it."""

    @classmethod
    def load(
        cls,
        source: str | Path | PreTrainedTokenizerFast,
        parser: Parser | str | None = None,
        settings: Settings | None = None,
        tools: Sequence[Tool] = (),
    ) -> Self:
        """Loads from a model's folder, or for a given tokenizer. Raises TemplateError, which says what is missing.

        The parser is an object, a name, or chosen by the template's source; some parsers need the tools.
        """
        settings = settings or Settings()
        tokenizer = load_tokenizer(source, settings.chat_template)
        kwargs = settings.chat_template_kwargs or {}
        chat = ChatTemplate(tokenizer, FencedTokenizer(tokenizer), settings.chat_template, kwargs, settings.calls)
        chat.require_valid_syntax()
        try:
            image_processor = ImageProcessor.load(Path(source)) if isinstance(source, str | Path) else None
        except VisionError as error:
            raise TemplateError(str(error)) from error
        if parser is None or isinstance(parser, str):
            schemas = _schemas(tools)
            parser = load_parser(parser, schemas) if parser else _choose_parser(chat, schemas, image_processor)
        return cls(chat, parser, load_stop_ids(source, tokenizer), settings, image_processor)

    def with_tools(self, tools: Sequence[Tool]) -> Self:
        """This template with a parser that knows other tools; some formats need them to tell numbers from text."""
        if not isinstance(self.parser, CallParser):
            return self
        template = copy(self)
        template.parser = type(self.parser)(_schemas(tools), thinking_open=self.parser.thinking_open)
        return template

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that a policy must not sample, such as image placeholders."""
        return self.image_processor.family.banned_ids if self.image_processor else ()

    @property
    def calls_remedy(self) -> str:
        """The remedy if the template writes no calls, or not as training needs them."""
        return _calls_remedy(self.chat, self.image_processor)

    @property
    def max_calls(self) -> int | None:
        """How many calls of a turn the template writes; None for any number."""
        return None if self.chat.writes_several_calls else 1

    @property
    def image_layout(self) -> ImageLayout:
        """Where images of a tool's answer go."""
        return self.image_processor.family.image_layout if self.image_processor else "in_tool_message"

    def prepare_media(self, messages: Sequence[Message]) -> MediaLayout:
        """Replaces media in messages by placeholders or notes."""
        return prepare_media(messages, self.image_processor, self.image_layout)

    def count_images(self, ids: Sequence[int]) -> int:
        """The number of image placeholders."""
        return sum(token == self.image_processor.family.image_id for token in ids) if self.image_processor else 0

    def attach_media(self, layout: MediaLayout, entry: Entry) -> Entry:
        """The entry with the layout's messages and media, and the spans of their placeholders."""
        processor = self.image_processor if layout.media and entry.ids else None
        spans = layout.find_spans(entry.ids, processor.family.image_id) if processor else ()
        widths = layout.widths if spans else ()
        parts = layout.replace_media(entry.parts)
        return replace(entry, messages=layout.messages, parts=parts, spans=spans, widths=widths)

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """The prompt of a conversation, including the generation prompt."""
        return self.tokenizer.encode(self.chat.render(messages, tools, add_generation_prompt=True))

    def encode_tail(
        self, messages: Sequence[Message], *, ended: bool, calls: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """What follows a policy's turn: its end (unless the policy `ended` it), the messages, the generation prompt.

        `calls` are those of the turn, as in its message.
        """
        suffix = self.chat.render_suffix(messages, self.stop_tokens, calls)
        if ended:
            return self.tokenizer.encode(suffix.rest, after=suffix.end)
        return self.tokenizer.encode(suffix.closing + suffix.end + suffix.rest)

    def encode_insert(self, text: str) -> tuple[int, ...]:
        """Text to insert into the policy's unfinished turn; it may contain markup, but no special tokens."""
        return self.tokenizer.encode(self.tokenizer.fence(text, markup=True), after=self.stop_tokens[0])

    def rerender_prompt(self, ledger: Ledger, tools: Sequence[Tool] = ()) -> tuple[int, ...] | None:
        """The prompt of a new ledger, if `history` is `inference_template` and the template changes the history.

        Renders the whole history each time. Ids that only differ by the policy's tokenization are kept.
        """
        if self.settings.history == "full":
            return None
        text = self.chat.render(ledger.messages, tools, add_generation_prompt=True)
        if strip_fences(text) == self.tokenizer.decode(ledger.ids):
            return None
        return self.tokenizer.encode(text)

    def is_turn_ended(self, ids: Sequence[int]) -> bool:
        """Whether the policy ended its turn itself, at the last of these ids."""
        return bool(ids) and ids[-1] in self.stop_ids

    def parse_turn(self, ids: Sequence[int]) -> Reply:
        """The content, reasoning and calls of a turn."""
        text = self.decode_turn(ids)
        if self.closing and text.rstrip().endswith(self.closing):  # A mark between an answer and its end token.
            text = text.rstrip().removesuffix(self.closing)
        return self.parser.parse(self.prefill + text.removeprefix(self.lead))

    def decode_turn(self, ids: Sequence[int]) -> str:
        """The text of a turn, with reasoning and calls, but without its end token."""
        return self.tokenizer.decode(ids[:-1] if self.is_turn_ended(ids) else ids)

    def decode_without_special(self, ids: Sequence[int]) -> str:
        """The text of ids without special tokens, as transformers decodes it with `skip_special_tokens`."""
        return str(self.chat.hf_tokenizer.decode(list(ids), skip_special_tokens=True))

    def build_message(self, reply: Reply) -> Message:
        """The chat message of a policy's turn, for the ledger."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [build_call(call.id, call.name, call.arguments) for call in reply.calls]
        return message


def _schemas(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """Each tool's parameters."""
    functions = (function_schema(tool)["function"] for tool in tools)
    return {function["name"]: function.get("parameters") or {} for function in functions}


def _choose_parser(
    chat: ChatTemplate, schemas: Mapping[str, Mapping[str, Any]], image_processor: ImageProcessor | None
) -> Parser:
    if chat.call_format == "text":
        return Hermes(schemas)
    try:
        return choose_parser(chat.source, schemas)
    except ConfigError as error:
        if not schemas:
            return Plain()
        if chat.writes_calls:
            raise
        raise TemplateError(NO_CALLS, _calls_remedy(chat, image_processor)) from error


NO_CALLS = "the chat template does not write the assistant's calls"


def _calls_remedy(chat: ChatTemplate, image_processor: ImageProcessor | None) -> str:
    name = image_processor.family.builtin_template if image_processor else None
    if name:
        return f"set `template.chat_template: {name}`, which comes with the package for this family"
    text = "set `template.calls: text`, which writes tools and calls as text"
    return text if chat.call_format == "template" else OTHER_TEMPLATE


def _call_end_tokens(chat: ChatTemplate) -> list[str]:
    """The end token of a turn with calls, if it differs; none if the template writes no calls."""
    try:
        end = chat.tokenizer.find_last_special(chat.render_closing(called=True))
    except TemplateError:
        return []
    # A closing tag ends a call, not a turn.
    return [] if end.startswith(("</", "[/")) else [end]


def _find_prefill(prompt: str, marks: Collection[str]) -> str:
    """The end of a generation prompt, from a tag that it leaves open, or from an empty block of reasoning.

    `marks` are tokens in the form of a tag that do not open reasoning, such as `<start_of_turn>`.
    """
    for tag in _OPENING_TAG.finditer(prompt):
        if tag[0] not in marks and f"/{tag[1]}" not in prompt[tag.end() :]:
            return prompt[tag.start() :]
    block = _NO_REASONING.search(prompt)
    return block[0] if block else ""
