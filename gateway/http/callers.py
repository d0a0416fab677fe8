"""Several callers of one gateway, by name: each has a token, the tools it may use, and sessions that no other can use.

Each caller has an application of its own, over a view of the gateway. Its calls are logged, one line each.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SecretStr, TypeAdapter, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.config.base import FrozenModel
from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.http.activity import MAX_CHARS, session_digest
from gateway.session import GatewaySession, ObservedCall, Observer
from gateway.session_protocols import open_session
from gateway.tool_table import EMPTY_TABLE, Source, ToolTable
from gateway.types import Task, ToolSpec

audit = logging.getLogger("gateway.audit")
audit.setLevel(logging.INFO)
MIN_TOKEN = 16


class Caller(FrozenModel):
    """One caller's token and rights."""

    token: Annotated[SecretStr, Field(min_length=MIN_TOKEN)]
    tools: tuple[str, ...] = ("*",)
    """Names of the tools that it sees and may call, or patterns such as `math_*`; interactions are tools too."""
    operator: bool = False
    """Whether it also sees servers and their logs, and may restart servers."""


def read_callers(file: Path) -> Mapping[str, Caller]:
    """The callers in a JSON file, by name; raises ConfigError without quoting a token."""
    form = '{"alice": {"token": "...", "tools": ["math_*"]}, "ops": {"token": "...", "operator": true}}'
    try:
        callers = TypeAdapter(dict[str, Caller]).validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=file, remedy="name a file of callers") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(first["msg"], file=file, field=place, remedy=f"the form is {form}") from None
    tokens = {caller.token.get_secret_value() for caller in callers.values()}
    if (
        len(tokens) < len(callers)
        or not callers
        or not all(token.isascii() and token.split() == [token] for token in tokens)
    ):
        problem = "there are no callers, two have the same token, or a token has spaces or no ASCII letters"
        raise ConfigError(problem, file=file, remedy=f"the form is {form}")
    return callers


class CallerGateway:
    """What one caller sees of a gateway: its tools and its sessions; its servers only if it is an operator."""

    def __init__(self, gateway: Gateway, name: str, caller: Caller) -> None:
        self._gateway, self._name, self._caller = gateway, name, caller
        self.sessions: dict[str, GatewaySession] = {}
        self.observers: list[Observer] = [self._log_call]
        self._whole, self._table = EMPTY_TABLE, EMPTY_TABLE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gateway, name)

    @property
    def table(self) -> ToolTable:
        whole = self._gateway.table
        if whole is not self._whole:
            self._whole, self._table = whole, replace(whole, tools=self._allowed(whole.tools))
            if not self._caller.operator:
                self._table = replace(self._table, set_aside={}, clashes={})
        return self._table

    def _allowed(self, tools: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tool for name, tool in tools.items() if any(fnmatchcase(name, one) for one in self._caller.tools)}

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self.table.specs

    @property
    def sources(self) -> Sequence[Source]:
        return self._gateway.sources if self._caller.operator else ()

    @property
    def reload_refusal(self) -> object:
        return self._gateway.reload_refusal if self._caller.operator else None

    def open(self, task: Task) -> AbstractAsyncContextManager[GatewaySession]:
        return open_session(partial(self.begin, task))

    async def begin(self, task: Task) -> GatewaySession:
        session = await self._gateway.begin(task, lambda: self.table, self.observers)
        self.sessions[session.id] = session
        session.stack.callback(self.sessions.pop, session.id)
        return session

    def _log_call(self, observed: ObservedCall) -> None:
        for observe in self._gateway.observers:
            observe(observed)
        call, result = observed.call, observed.result
        fields = {
            "caller": self._name,
            "session": session_digest(observed.session_id),
            "call": call.id[:MAX_CHARS],
            "tool": call.name[:MAX_CHARS],
            "outcome": result.outcome.value,
            "seconds": round(result.elapsed_s, 6),
        }
        audit.info("%s", " ".join(f"{name}={value!r}" for name, value in fields.items()), extra={"fields": fields})


class CallersApp:
    """Gives each request to the application of the caller whose token it has; others to one that refuses them."""

    def __init__(self, apps: Sequence[tuple[Caller, ASGIApp]], refuse: ASGIApp) -> None:
        self._apps = [(b"bearer " + caller.token.get_secret_value().encode(), app) for caller, app in apps]
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        given = scheme.lower() + b" " + token.strip()
        # Every token is compared, so that the time tells nothing of how many there are before the right one.
        found = [app for expected, app in self._apps if hmac.compare_digest(expected, given)]
        await (found[0] if found else self._refuse)(scope, receive, send)
