"""The model's own chat template, appended by difference: each turn costs what is new in it, whatever came before."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from gateway.errors import ConfigError
from trainer.ledger import Entry, Ledger, Message
from trainer.parse.base import Parser, Reply
from trainer.parse.choose import choose, named
from trainer.vision.eyes import Eyes, SightError
from trainer.vision.family import Layout

from .chat import Chat, Tool, called, schema
from .errors import TemplateError
from .laid import Blind, Laid, lay
from .load import stops_of, tokenizer_of
from .tokens import Tokens, plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

History = Literal["full", "inference_template"]
Sanity = Literal["strict", "ignore_strippable", "disable"]
_MARKUP = re.compile(r"[<\[](\w+)[>\]]")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a template is used."""

    history: History = "full"
    """`full` keeps the policy's earlier reasoning, so that a rollout is one ledger. `inference_template` shows the
    policy what the template would at inference: where that takes reasoning away, a new ledger begins."""
    sanity: Sanity = "strict"
    """What the check at a rollout's end tells of: every difference, those beside white space, or nothing."""
    chat_template: str | None = None
    """In place of the one in the model's folder."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Passed on to the template, as `enable_thinking`."""
    images: Literal["auto"] | Layout = "auto"
    """Where a picture stands that a tool answered with; by default as suits the model's family."""
    blind: Blind = "note"
    """What becomes of a picture that the model cannot see: words in its place, or the rollout's end."""


class Template:
    """Prompts and tails as ids. Nothing else tokenises, and nothing here tokenises what the policy wrote."""

    def __init__(
        self, chat: Chat, parser: Parser, stops: Sequence[int], settings: Settings, eyes: Eyes | None = None
    ) -> None:
        self.chat, self.tokens, self.parser, self.settings = chat, chat.tokens, parser, settings
        self.eyes = eyes
        """Of a model that sees."""
        names = {id: token for token, id in self.tokens.control.items()}
        own = [self.tokens.last_special(chat.closing(called=False)), *_calling(chat)]
        ids = dict.fromkeys([*stops, *(self.tokens.control[token] for token in own if token)])
        self.stop_ids: tuple[int, ...] = tuple(ids)
        """Sampling one of these ends a turn."""
        self.stops: tuple[str, ...] = tuple(names[id] for id in ids if id in names)
        between = chat.follow([{"role": "user", "content": "Go on"}], self.stops).end
        self.ends = tuple(dict.fromkeys([*self.stops, *([between] if between else [])]))
        """The tokens at the end of a turn, whether sampling them stops or not."""
        self.opened = _unclosed(plain(chat.prompt))
        """What of the policy's turn the generation prompt wrote already: `<think>`, where reasoning is begun for it."""

    @classmethod
    def load(
        cls,
        source: str | Path | PreTrainedTokenizerFast,
        parser: Parser | str | None = None,
        settings: Settings | None = None,
        tools: Sequence[Tool] = (),
    ) -> Self:
        """From a model's folder, or for a tokenizer at hand; `TemplateError` says what is missing.

        The parser is given, or named, or chosen by what the template looks like; some want to know the tools.
        """
        settings = settings or Settings()
        tokenizer = tokenizer_of(source, settings.chat_template)
        kwargs = settings.chat_template_kwargs or {}
        chat = Chat(tokenizer, Tokens(tokenizer), settings.chat_template, kwargs)
        try:
            eyes = Eyes.load(Path(source)) if isinstance(source, str | Path) else None
        except SightError as error:
            raise TemplateError(str(error)) from error
        if parser is None or isinstance(parser, str):
            functions = [schema(tool)["function"] for tool in tools]
            schemas = {one["name"]: one.get("parameters") or {} for one in functions}
            parser = named(parser, schemas) if parser else _chosen(chat, schemas, eyes)
        return cls(chat, parser, stops_of(source, tokenizer), settings, eyes)

    @property
    def barred(self) -> tuple[int, ...]:
        """Ids that no policy may write: they stand for what it cannot give."""
        return self.eyes.family.barred if self.eyes else ()

    @property
    def remedy(self) -> str:
        """Where the template writes no calls, and one that does comes with the package; else nothing."""
        return _shipped(self.eyes)

    @property
    def layout(self) -> Layout:
        """Where a picture stands that a tool answered with."""
        if self.settings.images != "auto":
            return self.settings.images
        return self.eyes.family.layout if self.eyes else "in_tool_message"

    def lay(self, messages: Sequence[Message]) -> Laid:
        """Takes media out of messages that hold any, and says what of them the model sees."""
        return lay(messages, self.eyes, self.layout, self.settings.blind)

    def places(self, ids: Sequence[int]) -> int:
        """How many pictures these ids have a place for."""
        return sum(token == self.eyes.family.image for token in ids) if self.eyes else 0

    def placed(self, laid: Laid, entry: Entry) -> Entry:
        """The entry of these messages: each medium stands where its place is among the ids, if there are any."""
        spans = laid.spans(entry.ids, self.eyes.family.image) if self.eyes and laid.media and entry.ids else ()
        widths = laid.widths if spans else ()
        return replace(entry, messages=laid.messages, parts=laid.parts(entry.parts), spans=spans, widths=widths)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """The prompt of a conversation, up to where the policy writes."""
        return self.tokens.encode(self.chat.text(messages, tools, prompt=True))

    def tail(self, after: Sequence[Message], *, ended: bool) -> tuple[int, ...]:
        """What follows a policy's turn: its closing (unless the policy `ended` it), the new messages, the prompt."""
        follow = self.chat.follow(after, self.stops)
        if ended:
            return self.tokens.encode(follow.rest, after=follow.end)
        return self.tokens.encode(follow.closing + follow.end + follow.rest)

    def insert(self, text: str) -> tuple[int, ...]:
        """Text that goes on in the policy's unfinished turn; its markup is meant, its special tokens are not."""
        return self.tokens.encode(self.tokens.fenced(text, markup=True), after=self.stops[0])

    def anew(self, ledger: Ledger, tools: Sequence[Tool] = ()) -> tuple[int, ...] | None:
        """Where `history` is as at inference and that takes words back: the prompt that a new ledger begins with.

        Costs a render of the history each time. What the policy wrote in tokens of its own choice is not taken back.
        """
        if self.settings.history == "full":
            return None
        shown = self.chat.text(ledger.messages, tools, prompt=True)
        return None if plain(shown) == self.tokens.decode(ledger.ids) else self.tokens.encode(shown)

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether the policy itself ended the turn that these ids end with."""
        return bool(ids) and ids[-1] in self.stop_ids

    def read(self, ids: Sequence[int]) -> Reply:
        """What the policy wrote in one turn, for reading only."""
        return self.parser.parse(self.opened + self.words(ids))

    def words(self, ids: Sequence[int]) -> str:
        """The text of these ids, reasoning and calls included, without what ended the turn."""
        return self.tokens.decode(ids[:-1] if self.ended(ids) else ids)

    def message(self, reply: Reply) -> Message:
        """The chat message of a policy's turn, as a ledger keeps it."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [called(call.id, call.name, call.arguments) for call in reply.calls]
        return message


def _chosen(chat: Chat, schemas: Mapping[str, Mapping[str, Any]], eyes: Eyes | None) -> Parser:
    try:
        return choose(chat.source, schemas)
    except ConfigError as error:
        if chat.calls or not _shipped(eyes):
            raise
        raise ConfigError(error.problem, field=error.field, remedy=_shipped(eyes)) from error


def _shipped(eyes: Eyes | None) -> str:
    name = eyes.family.chat if eyes else None
    return f"set `template.chat_template: {name}`, which comes with the package for this family" if name else ""


def _calling(chat: Chat) -> list[str]:
    """The end of a turn with calls, which some templates end otherwise; none where it cannot write calls."""
    try:
        end = chat.tokens.last_special(chat.closing(called=True))
    except TemplateError:
        return []
    # A closing tag ends a call, not a turn.
    return [] if end.startswith(("</", "[/")) else [end]


def _unclosed(prompt: str) -> str:
    """The end of a generation prompt from a tag that it leaves open."""
    for tag in _MARKUP.finditer(prompt):
        if f"/{tag[1]}" not in prompt[tag.end() :]:
            return prompt[tag.start() :]
    return ""
