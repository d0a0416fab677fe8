"""A client of the endpoint for agents: plays the sessions on its input at once, and prints what came of them."""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import anyio
import httpx2

TIMEOUT_S = 600
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "page": {"type": "integer"}}},
    },
}
WORDS = "the page has a gnu, and a note on where it lives and what it eats; "


class Player:
    """Plays sessions, and counts what went wrong."""

    def __init__(self, http: httpx2.AsyncClient, order: dict[str, Any]) -> None:
        self.http, self.order = http, order
        self.errors = 0
        self.first_bytes: list[float] = []

    async def play(self, url: str, key: str) -> None:
        text = (WORDS * (self.order["prompt_bytes"] // len(WORDS) + 1))[: self.order["prompt_bytes"]]
        chat: list[dict[str, Any]] = [{"role": "user", "content": text}]
        for turn in range(self.order["turns"]):
            body = {"model": "policy", "messages": chat, "tools": [TOOL], "stream": bool(self.order.get("stream"))}
            message = await self.ask(url, key, body)
            if message is None:
                self.errors += 1
                return
            if self.order.get("grows", True):
                for call in message["tool_calls"]:  # As many programs do.
                    call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
                answers = [
                    {"role": "tool", "tool_call_id": call["id"], "content": f"{turn}: {WORDS * 8}"}
                    for call in message["tool_calls"]
                ]
                chat += [message, *answers]

    async def ask(self, url: str, key: str, body: dict[str, Any]) -> dict[str, Any] | None:
        headers = {"Authorization": f"Bearer {key}"}
        if not body["stream"]:
            answer = await self.http.post(url, json=body, headers=headers)
            message: dict[str, Any] | None = answer.json()["choices"][0]["message"] if answer.is_success else None
            return message
        async with self.http.stream("POST", url, json=body, headers=headers) as events:
            seen = False
            async for _ in events.aiter_raw():
                if not seen:
                    self.first_bytes.append(time.perf_counter())
                seen = True
        return {"tool_calls": []} if seen else None


async def main() -> None:
    order = json.load(sys.stdin)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(limits=limits, timeout=TIMEOUT_S, trust_env=False) as http:
        player = Player(http, order)
        async with anyio.create_task_group() as tasks:
            for url, key in order["sessions"]:
                tasks.start_soon(player.play, url, key)
    print(json.dumps({"errors": player.errors, "first_bytes": player.first_bytes}))


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 8192), hard), hard))
    anyio.run(main)
