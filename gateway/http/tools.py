"""What the gateway offers now, as a chat API takes it."""

from __future__ import annotations

from starlette.types import ASGIApp

from gateway.http.asked import Asked
from gateway.http.desk import Desk
from gateway.http.reply import json_reply
from gateway.http.sessions import listed


async def tools(desk: Desk, asked: Asked) -> ASGIApp:
    strict = asked.choice("strict", ("false", "true")) == "true"
    audience = asked.choice("audience", ("policy", "loop", "all"))
    form = asked.choice("form", ("openai", "spec"))
    specs = [spec for spec in desk.gateway.specs if audience in (spec.audience, "all")]
    return json_reply({"object": "list", "data": listed(specs, form, strict=strict)})
