"""Renders what an agent sends as the ids before the policy's turn, in a thread where it is much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

from anyio import to_thread

from mtrl_plugins.agents.policy_request import PolicyProblem
from mtrl_plugins.agents.turn_tree import Continuation, PolicyTurn
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.parse.base import Reply
from trainer.template import Template
from trainer.template.errors import TemplateError
from trainer.template.media_layout import MediaLayout, has_media

SMALL_CHARS = 65_536
"""A longer chat is rendered and encoded in a thread."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of one request."""

    chat: Continuation
    entry: Entry
    ledger: Ledger
    """Everything before the policy's turn."""
    template: Template
    tools: bytes
    """The digest of the tools."""


async def prepare_layout(template: Template, messages: Sequence[Message]) -> MediaLayout:
    """Prepares messages for the template; decoding images is done in a thread. Raises PolicyProblem."""
    if not has_media(messages):
        return MediaLayout(tuple(messages))
    try:
        return await to_thread.run_sync(template.prepare_media, messages)
    except TemplateError as error:
        raise PolicyProblem("invalid_request", str(error), param="messages") from error


async def render_entry(
    template: Template, parent: PolicyTurn | None, layout: MediaLayout, tools: Sequence[Mapping[str, Any]]
) -> Entry:
    """The entry before the policy's turn. Raises PolicyProblem for what the template refuses."""
    rendering = partial(_render, template, parent, layout, tools)
    is_small = sum(len(str(message.get("content"))) for message in layout.messages) <= SMALL_CHARS
    try:
        return rendering() if is_small else await to_thread.run_sync(rendering)
    except TemplateError as error:
        raise PolicyProblem("invalid_request", str(error), param="messages") from error


def join_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with those of the system at the start as one, as most templates take no second one."""
    texts = [str(message["content"]) for message in takewhile(lambda message: message["role"] == "system", messages)]
    if len(texts) < 2:
        return tuple(messages)
    return ({"role": "system", "content": "\n\n".join(texts)}, *messages[len(texts) :])


def _render(
    template: Template, parent: PolicyTurn | None, layout: MediaLayout, tools: Sequence[Mapping[str, Any]]
) -> Entry:
    """The entry before the policy's turn: a whole prompt, or what follows the turn before."""
    if parent is None:
        ids, author = template.encode_prompt(layout.messages, tools), Author.TASK
    else:
        calls = parent.message.get("tool_calls") or ()
        ids = template.encode_tail(layout.messages, ended=parent.ended, calls=calls)
        author = Author.TOOL if layout.messages[0]["role"] == "tool" else Author.FEEDBACK
    return template.attach_media(layout, Entry(author, ids, parts=layout.media, source="agent"))


def cut_stop_string(
    template: Template, reply: Reply, ids: tuple[int, ...], stops: Sequence[str]
) -> tuple[Reply, str | None]:
    """The reply without the stop string that ended it, as the protocols promise; the ids stay."""
    text = "" if not stops or template.is_turn_ended(ids) else template.decode_turn(ids)
    ends = [(text.find(stop), stop) for stop in stops if stop in text]
    if not ends:
        return reply, None
    stop = min(ends)[1]
    index = reply.content.find(stop)
    return (replace(reply, content=reply.content[:index]) if index >= 0 else reply), stop
