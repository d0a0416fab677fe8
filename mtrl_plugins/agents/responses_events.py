"""The events of Responses: items of reasoning, text and calls that are added, grow, and are done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtrl_plugins.agents.event_writer import EventWriter, write_event
from mtrl_plugins.agents.policy_request import PolicyAnswer, PolicyProblem, TurnStart
from mtrl_plugins.agents.responses_dialect import make_call_item, make_reasoning_item, make_response, make_text_item


class ResponsesEvents(EventWriter):
    """An answer as items; one of reasoning or text is open at a time."""

    _number = 0
    _open = ""
    """The type of the open item."""
    _text = ""
    """The text of the open item."""

    def begin(self, start: TurnStart) -> bytes:
        self._answer = PolicyAnswer(start.id, "", "", (), "stop", start.prompt_tokens, 0, 0)
        self._items: list[Mapping[str, Any]] = []
        started = {**make_response(self._answer, self.request, []), "status": "in_progress", "usage": None}
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def write_reasoning(self, text: str) -> bytes:
        text = text.removeprefix("\n") if self._open != "reasoning" else text
        events = self._switch("reasoning")
        self._text += text
        return events + self._event("response.reasoning_text.delta", delta=text, **self._place, content_index=0)

    def write_content(self, text: str) -> bytes:
        events = self._switch("message")
        self._text += text
        place = {**self._place, "content_index": 0}
        return events + self._event("response.output_text.delta", delta=text, logprobs=[], **place)

    def write_end(self, answer: PolicyAnswer) -> bytes:
        self._answer = answer
        events = [b"" if answer.content or answer.calls else self._switch("message"), self._close()]
        events += [self._write_call(make_call_item(call, self.request)) for call in answer.calls]
        done = make_response(answer, self.request, self._items)
        return b"".join([*events, self._event(f"response.{done['status']}", response=done)])

    def fail(self, problem: PolicyProblem) -> bytes:
        opening = b"" if hasattr(self, "_answer") else self.begin(TurnStart("failed", 0))
        failed = make_response(self._answer, self.request, self._items)
        error = {"code": "server_error", "message": problem.message}
        return opening + self._event(
            "response.failed", response={**failed, "status": "failed", "error": error, "usage": None}
        )

    def _write_call(self, item: dict[str, Any]) -> bytes:
        field = "arguments" if item["type"] == "function_call" else "input"
        kind = "function_call_arguments" if field == "arguments" else "custom_tool_call_input"
        self._items.append(item)
        whole = {field: item[field]} | ({"name": item["name"]} if field == "arguments" else {})
        index = self._place["output_index"]
        return b"".join(
            [
                self._event(
                    "response.output_item.added", output_index=index, item={**item, field: "", "status": "in_progress"}
                ),
                self._event(f"response.{kind}.delta", **self._place, delta=item[field]),
                self._event(f"response.{kind}.done", **self._place, **whole),
                self._event("response.output_item.done", output_index=index, item=item),
            ]
        )

    def _switch(self, kind: str) -> bytes:
        """Opens an item of this type, unless it is open."""
        if self._open == kind:
            return b""
        events = self._close()
        self._open, self._text = kind, ""
        item = self._make_item()
        if self._items:
            item["id"] += f"-{len(self._items)}"
        self._items.append(item)
        added = {**item, "content": [], "status": "in_progress"}
        events += self._event("response.output_item.added", output_index=self._place["output_index"], item=added)
        if kind == "message":
            events += self._event(
                "response.content_part.added", part=item["content"][0], **self._place, content_index=0
            )
        return events

    def _close(self) -> bytes:
        """Closes the open item."""
        if not self._open:
            return b""
        item = self._items[-1] = {**self._make_item(), "id": self._items[-1]["id"]}
        part, place = item["content"][0], {**self._place, "content_index": 0}
        if self._open == "reasoning":
            events = self._event("response.reasoning_text.done", text=part["text"], **place)
        else:
            events = self._event(
                "response.output_text.done", text=part["text"], logprobs=part["logprobs"], **place
            ) + self._event("response.content_part.done", part=part, **place)
        self._open = ""
        return events + self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _make_item(self) -> dict[str, Any]:
        if self._open == "message":
            return make_text_item(self._answer, self._text)
        return make_reasoning_item(self._answer.id, self._text)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return write_event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)
