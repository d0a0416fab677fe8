"""Credentials of one MCP server: headers that every request carries, renewed when they expire or are rejected.

Renewals run in a task of their own, at most one at a time: a caller that gives up does not lose a token that was
already issued, and a hundred calls that are rejected together cause one renewal.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio
import httpx2
from anyio.abc import TaskGroup

from gateway.mcp_client.errors import AUTH_REMEDY

RENEWAL_S = 60.0
"""Deadline of one renewal, all its requests included."""
_PARAMETER = r'(?:^|[\s,]){name}\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))'
_MAX_HEADER_CHARS = 16 * 1024
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")


class AuthError(httpx2.TransportError):
    """There are no credentials that the server would accept, and why. To a transport, the request was not sent."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


@dataclass(frozen=True, slots=True)
class Challenge:
    """What a server's refusal asks for: its status and `WWW-Authenticate` header."""

    status: int = 401
    header: str = ""

    @classmethod
    def of(cls, response: httpx2.Response) -> Challenge:
        return cls(response.status_code, response.headers.get("www-authenticate", "")[:_MAX_HEADER_CHARS])

    def parameter(self, name: str) -> str | None:
        match = re.search(_PARAMETER.format(name=re.escape(name)), self.header)
        return None if match is None else (match[1] or match[2])

    @property
    def is_step_up(self) -> bool:
        """The token is good, but its scopes are not enough."""
        return self.status == 403 and self.parameter("error") == "insufficient_scope"

    @property
    def can_be_met(self) -> bool:
        """Whether other credentials may change the answer."""
        return self.status == 401 or self.is_step_up


class Credentials(ABC):
    """Headers that change with time. `start` gives the tasks that renewals run in."""

    remedy = AUTH_REMEDY
    """What an operator can do if the server rejects these credentials."""

    def __init__(self) -> None:
        self._headers: Mapping[str, str] = {}
        self._renewal: _Renewal | None = None
        self._tasks: TaskGroup | None = None

    def start(self, tasks: TaskGroup) -> None:
        self._tasks = tasks

    async def get_headers(self) -> Mapping[str, str]:
        """The headers for a request; raises `AuthError` if there can be none."""
        if self.needs_renewal():
            try:
                await self._renew_once(None)
            except AuthError:
                if self.has_expired():
                    raise
        return self._headers

    async def renew(self, rejected: Mapping[str, str], challenge: Challenge) -> None:
        """Replaces headers that the server rejected, unless that has happened since; raises `AuthError`."""
        if self._headers is rejected:
            await self._renew_once(challenge)

    async def _renew_once(self, challenge: Challenge | None) -> None:
        if self._tasks is None:
            raise AuthError("the credentials were used before they were started")
        if self._renewal is None:
            self._renewal = _Renewal()
            self._tasks.start_soon(self._run_renewal, self._renewal, challenge)
        renewal = self._renewal
        await renewal.done.wait()
        if renewal.error is not None:
            raise AuthError(renewal.error.reason, renewal.error.remedy)

    async def _run_renewal(self, renewal: _Renewal, challenge: Challenge | None) -> None:
        renewal.error = AuthError(f"no new credentials within {RENEWAL_S:g} s", self.remedy)
        try:
            with anyio.move_on_after(RENEWAL_S):
                self._headers = dict(await self.fetch(challenge))
                renewal.error = None
        except AuthError as error:
            renewal.error = error
        except Exception as error:  # boundary: a file, a command or a server may fail in any way
            # Only the type: the text of an error may quote what was sent.
            renewal.error = AuthError(f"new credentials failed with {type(error).__name__}", self.remedy)
        finally:
            self._renewal = None
            renewal.done.set()

    @abstractmethod
    async def fetch(self, challenge: Challenge | None) -> Mapping[str, str]:
        """New headers; `challenge` is the server's refusal of the present ones, None if they expired."""

    @abstractmethod
    def needs_renewal(self) -> bool:
        """Whether to renew before the next request."""

    def has_expired(self) -> bool:
        """Whether the present headers are of no use any more."""
        return self.needs_renewal()


@dataclass(eq=False, slots=True)
class _Renewal:
    done: anyio.Event = field(default_factory=anyio.Event)
    error: AuthError | None = None


def check_header(name: str, value: str) -> tuple[str, str]:
    """A header that can be sent; raises ValueError, without the value."""
    if _HEADER_NAME.fullmatch(name) is None:
        raise ValueError("a header name has characters that headers cannot have")
    if not value.isascii() or not value.isprintable() or value != value.strip() or len(value) > _MAX_HEADER_CHARS:
        raise ValueError(f"the value of {name} has characters that headers cannot have, or is too long")
    return name, value
