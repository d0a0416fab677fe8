"""Reads streams of server-sent events in tests of the protocols."""

from __future__ import annotations

import json
from typing import Any


def read_events(text: str) -> list[dict[str, Any]]:
    """The JSON of each event; the event's name, where it has one, is its type."""
    events = []
    for block in filter(None, text.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in block.strip().splitlines())
        if fields["data"] == "[DONE]":
            continue
        event = json.loads(fields["data"])
        assert fields.get("event", event.get("type")) == event.get("type")
        events.append(event)
    return events
