"""The events of Anthropic's Messages: blocks of thinking, text and calls that are opened, added to and closed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mtrl_plugins.agents.anthropic_dialect import count_usage, describe_message, make_call_block, write_problem
from mtrl_plugins.agents.event_writer import EventWriter, write_event
from mtrl_plugins.agents.policy_request import PolicyAnswer, PolicyProblem, TurnStart

_EMPTY: Mapping[str, Mapping[str, Any]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class AnthropicEvents(EventWriter):
    """An answer as blocks; one is open at a time."""

    _open = ""
    """The type of the open block."""
    _count = 0
    """How many blocks there are."""

    def begin(self, start: TurnStart) -> bytes:
        empty = PolicyAnswer(start.id, "", "", (), "stop", start.prompt_tokens, 0, 0)
        message = {**describe_message(empty, self.request), "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**message, "content": [], "usage": count_usage(empty)})

    def write_reasoning(self, text: str) -> bytes:
        text = text.removeprefix("\n") if self._open != "thinking" else text
        return self._switch("thinking") + self._delta({"type": "thinking_delta", "thinking": text})

    def write_content(self, text: str) -> bytes:
        return self._switch("text") + self._delta({"type": "text_delta", "text": text})

    def write_end(self, answer: PolicyAnswer) -> bytes:
        events = [self._close()]
        for call in answer.calls:
            block = make_call_block(call)
            events.append(self._start({**block, "input": {}}))
            events.append(self._delta({"type": "input_json_delta", "partial_json": json.dumps(block["input"])}))
            events.append(_event("content_block_stop", index=self._count - 1))
        message = describe_message(answer, self.request)
        ending = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        events.append(_event("message_delta", delta=ending, usage=count_usage(answer)))
        return b"".join([*events, _event("message_stop")])

    def fail(self, problem: PolicyProblem) -> bytes:
        return b"event: error\ndata: " + write_problem(problem) + b"\n\n"

    def _switch(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        events = self._close() + self._start(_EMPTY[kind])
        self._open = kind
        return events

    def _start(self, block: Mapping[str, Any]) -> bytes:
        self._count += 1
        return _event("content_block_start", index=self._count - 1, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._count - 1, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": ""}) if self._open == "thinking" else b""
        self._open = ""
        return signed + _event("content_block_stop", index=self._count - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return write_event({"type": kind, **fields}, kind)
