"""What the rooms share: the gateway, the settings, and the sessions that were opened over HTTP.

Sessions that others opened on the same gateway are not at this desk, so no id of ours can reach them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import anyio

from gateway.http.hosted import Hosted, HostedSession
from gateway.http.live import Live
from gateway.http.metrics import Metrics
from gateway.http.reply import no_session
from gateway.http.settings import Settings
from gateway.http.watch import Watch
from gateway.strict import drop_nulls
from gateway.strict import strict as strictly
from gateway.types import Task, ToolCall


@dataclass(slots=True)
class Opened:
    session: HostedSession
    strict: Mapping[str, Mapping[str, Any]]
    """By name, the schemas that the policy saw under strict rules; empty where it did not ask for them."""
    closed: anyio.Event
    is_strict: bool = False
    calls: int = 0

    @property
    def feedback(self) -> str | None:
        """The interaction that answers here."""
        name = self.session.task.feedback or getattr(self.session.heard, "name", None)
        return name if isinstance(name, str) else None

    @property
    def expires_at(self) -> float | None:
        remaining_s = self.session.remaining_s
        return None if remaining_s is None else time.time() + remaining_s

    @property
    def rewards(self) -> list[dict[str, Any]]:
        return [asdict(reward) for reward in self.session.rewards]

    def meant(self, calls: Sequence[ToolCall]) -> Sequence[ToolCall]:
        """The calls without the nulls that strict rules forced on the policy."""
        return [self._meant(call) for call in calls] if self.strict else calls

    def _meant(self, call: ToolCall) -> ToolCall:
        parameters = self.strict.get(call.name)
        if parameters is None or "null" not in call.arguments:
            return call
        try:
            kept = drop_nulls(json.loads(call.arguments), parameters)
        except (ValueError, RecursionError):
            return call  # the check of the arguments says what is wrong, in the policy's words
        return replace(call, arguments=json.dumps(kept, ensure_ascii=False))


class Desk:
    def __init__(self, gateway: Hosted, settings: Settings, watch: Watch) -> None:
        self.gateway, self.settings, self.watch = gateway, settings, watch
        self.opened: dict[str, Opened] = {}
        self.metrics = Metrics(gateway)
        self.live = Live(gateway, watch.over)
        gateway.observers.extend((self.metrics.observe, self.live.observe))

    async def begin(self, task: Task, *, strict: bool) -> Opened:
        session = await self.gateway.begin(task)
        schemas = {spec.name: spec.parameters for spec in session.specs if strict and strictly(spec.parameters)}
        opened = Opened(session, schemas, anyio.Event(), strict)
        self.opened[session.id] = opened
        session.stack.callback(self._forget, session.id)
        return opened

    def find(self, id: str) -> Opened:
        opened = self.opened.get(id)
        if opened is None or opened.session.closed:
            raise no_session()
        return opened

    def _forget(self, id: str) -> None:
        self.opened.pop(id).closed.set()
