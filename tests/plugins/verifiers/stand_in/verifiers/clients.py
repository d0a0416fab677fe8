"""A client of a chat endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from typing import Any


class OverlongPromptError(Exception):
    pass


class Client:
    def __init__(self, config: Any) -> None:
        self.config = config

    async def complete(self, model: str, messages: Any, tools: Any) -> Any:
        return await asyncio.to_thread(self._post, {"model": model, "messages": messages, "tools": tools})

    def _post(self, body: Any) -> Any:
        headers = {"Authorization": f"Bearer {os.environ[self.config.api_key_var]}"}
        url = f"{self.config.api_base_url}/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as response:
                return json.load(response)["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            if "maximum context length" in text:
                raise OverlongPromptError(text) from error
            raise RuntimeError(text) from error

    async def close(self) -> None: ...


def resolve_client(config: Any) -> Client:
    return Client(config)
