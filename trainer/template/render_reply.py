"""Renders a message as the ids that the policy would have to write: for demonstrations, scripts and the probe."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.ledger import Message
from trainer.template.chat_template import Tool
from trainer.template.difference import mark_difference
from trainer.template.drift import strip_end_token
from trainer.template.errors import OTHER_TEMPLATE, TemplateError
from trainer.template.template import Template
from trainer.template.tokenizer import strip_fences


def render_reply(
    template: Template, before: Sequence[Message], turn: Message, tools: Sequence[Tool] = ()
) -> tuple[int, ...]:
    """The ids of the policy's `turn` after the conversation `before`, including the end token."""
    rendered = strip_fences(template.chat.render(before, tools, add_generation_prompt=True))
    prompt = rendered.removesuffix(template.prefill)
    text = strip_fences(template.chat.render([*before, turn], tools))
    if not text.startswith(prompt):
        texts = mark_difference("before the turn", prompt, "with the turn", text)
        raise TemplateError(f"a turn of the policy changes the text before it:{texts}", OTHER_TEMPLATE)
    text = strip_end_token(template, text[len(prompt) :])
    if template.prefill:
        text = _continue_prefill(template.prefill, text)
    return template.tokenizer.encode(text + _end_token(template, turn), after=template.stop_tokens[0])


def _continue_prefill(prefill: str, text: str) -> str:
    """Continues the reasoning that the prompt opened, or closes it if the turn has none."""
    if text.startswith(prefill):
        return text.removeprefix(prefill)
    tag = prefill.strip()
    if "/" in tag:  # An empty block of reasoning, which the template does not repeat in the turn.
        return text
    return f"\n{tag[0]}/{tag[1:]}\n\n{text}"


def _end_token(template: Template, turn: Message) -> str:
    """The token by which the policy stops; some templates write another one in earlier turns."""
    calls = turn.get("tool_calls") or ()
    replies: list[Message] = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "x"} for call in calls
    ]
    after = replies or [{"role": "user", "content": "x"}]
    end = template.chat.render_suffix(after, template.stop_tokens).end
    if end in template.stop_tokens:
        return end
    closing = template.tokenizer.find_last_special(template.chat.render_closing(called=bool(calls)))
    return closing if closing in template.stop_tokens else end
