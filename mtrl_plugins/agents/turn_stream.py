"""A turn while it is sampled: ids become text, and text becomes the parts that an agent can be given already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from mtrl_plugins.agents.policy_request import TurnDelta, TurnStart
from trainer.parse.base import Reply
from trainer.parse.reply_stream import ReplyStream
from trainer.template import Template

UNFINISHED = "\ufffd"
"""What the bytes of an unfinished character are decoded as."""


class TurnListener(Protocol):
    """Who is given a turn as it comes."""

    def on_start(self, start: TurnStart) -> None:
        """The engine sampled the first id. Until then an answer may still be an error."""

    def on_delta(self, delta: TurnDelta) -> None: ...


class TurnStream:
    """Reads a turn's ids as they come. What is sent begins the final answer, whatever the policy writes."""

    def __init__(self, template: Template, stops: Sequence[str], start: TurnStart, listener: TurnListener) -> None:
        self._stops, self._start, self._listener = stops, start, listener
        self._has_started = False
        self._text = _TextStream(template)
        self._reply = ReplyStream(template.parser, template.closing)
        self._reply.feed(template.prefill)
        self.sent = TurnDelta()
        """Everything that was sent."""

    def feed(self, ids: Sequence[int]) -> None:
        """Reads sampled ids, and sends what no later ones can change."""
        self._begin()
        self._reply.feed(self._text.feed(ids))
        self._send_up_to(self._before_stop(self._reply.content), self._reply.reasoning)

    def finish(self, reply: Reply) -> Reply:
        """The turn as the agent is given it. Text that a lone closing tag makes reasoning stays what it was sent as."""
        self._begin()
        content, reasoning = reply.content, reply.reasoning
        if not (content.startswith(self.sent.content) and reasoning.startswith(self.sent.reasoning)):
            content, reasoning = self.sent.content + content, self.sent.reasoning
        return replace(reply, content=content, reasoning=reasoning)

    def _begin(self) -> None:
        if not self._has_started:
            self._has_started = True
            self._listener.on_start(self._start)

    def _before_stop(self, content: str) -> str:
        """The content without a stop string, or what can become one."""
        ends = [content.find(stop) for stop in self._stops if stop in content]
        longest = max(map(len, self._stops), default=1)
        return content[: min(ends)] if ends else content[: len(content) - longest + 1]

    def _send_up_to(self, content: str, reasoning: str) -> None:
        delta = TurnDelta(content[len(self.sent.content) :], reasoning[len(self.sent.reasoning) :])
        if delta.content or delta.reasoning:
            self.sent = TurnDelta(self.sent.content + delta.content, self.sent.reasoning + delta.reasoning)
            self._listener.on_delta(delta)


class _TextStream:
    """Decodes ids piece by piece: only the latest are decoded again, and never half a character is given."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._ids: list[int] = []
        """Those whose text was given last, as decoders look at what is before an id, and those that come next."""
        self._given = 0
        self._start: str | None = ""
        """The text so far, while it may be the white space that the template writes before an answer."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that ids add."""
        self._ids += [id for id in ids if id not in self._template.stop_ids]
        decode = self._template.tokenizer.decode
        before, text = decode(self._ids[: self._given]), decode(self._ids)
        if text.endswith(UNFINISHED) or not text.startswith(before):
            return ""
        self._ids, new = self._ids[self._given :], text[len(before) :]
        self._given = len(self._ids)
        return self._without_lead(new)

    def _without_lead(self, text: str) -> str:
        lead = self._template.lead
        if self._start is None:
            return text
        self._start = start = self._start + text
        if len(start) < len(lead) and lead.startswith(start):
            return ""
        self._start = None
        return start.removeprefix(lead)
