"""A request is read once, into the form that its room expects, or refused with the first mistake in it."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import parse_qs

from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope

from gateway.http.reply import Problem

M = TypeVar("M", bound=BaseModel)


class Gone(Exception):
    """Whoever asked has hung up: there is nobody to answer."""


class Asked:
    __slots__ = ("receive", "scope")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope, self.receive = scope, receive

    @property
    def path(self) -> dict[str, str]:
        found: dict[str, str] = self.scope["path_params"]
        return found

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """A word of the query string; the first choice where there is none."""
        query: str = self.scope["query_string"].decode("latin-1")
        word = parse_qs(query, keep_blank_values=True).get(name, [choices[0]])[-1]
        if word not in choices:
            remedy = f"Use one of: {', '.join(choices)}."
            raise Problem(422, "invalid_request", f"No such {name}.", remedy=remedy, param=name)
        return word

    def number(self, name: str) -> int:
        """A number of the query string, not below 0; 0 where there is none."""
        query: str = self.scope["query_string"].decode("latin-1")
        word = parse_qs(query, keep_blank_values=True).get(name, ["0"])[-1]
        if not (word.isascii() and word.isdigit() and len(word) < 10):
            raise Problem(422, "invalid_request", f"No such {name}.", remedy="Use a number from 0 on.", param=name)
        return int(word)

    async def body(self) -> bytes:
        message = await self.receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            whole: bytes = message.get("body", b"")
            return whole
        chunks = []
        while message["type"] == "http.request":
            chunks.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(chunks)
            message = await self.receive()
        raise Gone

    async def read(self, model: type[M]) -> M:
        return parse(model, await self.body())


def parse(model: type[M], body: bytes) -> M:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _problem(error) from None


def _problem(error: ValidationError) -> Problem:
    """The first mistake, without the value: a body may hold secrets, and answers are logged by callers."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return Problem(400, "invalid_request", first["msg"], remedy="Send one JSON object, in UTF-8.")
    where = ".".join(str(step) for step in first["loc"])
    remedy = "See /openapi.json for the fields."
    return Problem(422, "invalid_request", first["msg"], remedy=remedy, param=where)
