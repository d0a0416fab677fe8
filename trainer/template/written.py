"""What a policy would have to write to say a message: for demonstrations, scripted policies, and the probe."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.ledger import Message

from .chat import Tool
from .drift import body
from .errors import TemplateError
from .template import Template
from .tokens import plain


def written(
    template: Template, before: Sequence[Message], turn: Message, tools: Sequence[Tool] = ()
) -> tuple[int, ...]:
    """The ids of `turn` after the conversation `before`, with the token that ends it."""
    prompted = plain(template.chat.text(before, tools, prompt=True)).removesuffix(template.opened)
    text = plain(template.chat.text([*before, turn], tools))
    if not text.startswith(prompted):
        apart = next((i for i, (a, b) in enumerate(zip(prompted, text, strict=False)) if a != b), len(text))
        raise TemplateError(
            "a turn of the policy changes what stands before it: "
            f"{prompted[apart : apart + 60]!r} becomes {text[apart : apart + 60]!r}",
            "give another template by the setting `template.chat_template`",
        )
    text = body(template, text[len(prompted) :])
    if template.opened:
        text = _reasoned(template.opened, text)
    return template.tokens.encode(text + _end(template, turn), after=template.stops[0])


def _reasoned(opened: str, text: str) -> str:
    """The generation prompt began a thought: it is closed, where the template would not write it at all."""
    if text.startswith(opened):
        return text.removeprefix(opened)
    tag = opened.strip()
    return f"\n{tag[0]}/{tag[1:]}\n\n{text}"


def _end(template: Template, turn: Message) -> str:
    """The token by which the policy stops; in an older turn some templates put another in its place."""
    calls = turn.get("tool_calls") or ()
    after: list[Message] = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "x"} for call in calls
    ]
    end = template.chat.follow(after or [{"role": "user", "content": "x"}], template.stops).end
    if end in template.stops:
        return end
    closing = template.tokens.last_special(template.chat.closing(called=bool(calls)))
    return closing if closing in template.stops else end
