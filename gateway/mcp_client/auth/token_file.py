"""OAuth tokens on disk: a file of mode 600 per server in the user's state folder, shared by several processes.

A lock file beside it keeps two processes from spending one refresh token twice.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from mcp.shared.auth import OAuthClientInformationFull
from pydantic import BaseModel, ConfigDict, ValidationError

from gateway.mcp_client.auth.credentials import AuthError
from gateway.sandbox.program_users import try_lock

LOCK_S = 30.0
"""How long to wait for another process that renews the same tokens."""
_POLL_S = 0.05
_MAX_FILE_BYTES = 1024 * 1024


class Tokens(BaseModel):
    """Tokens of one server, with all that is needed to refresh them."""

    model_config = ConfigDict(hide_input_in_errors=True)

    access_token: str
    refresh_token: str | None = None
    expires_at: float | None = None
    """`time.time()` at which the access token expires."""
    scope: str | None = None
    """The granted scopes, separated by spaces."""
    issuer: str
    token_endpoint: str
    revocation_endpoint: str | None = None
    resource: str

    def __repr__(self) -> str:
        return f"Tokens(issuer={self.issuer!r})"

    def expires_within(self, margin_s: float) -> bool:
        return self.expires_at is not None and time.time() > self.expires_at - margin_s


class Login(BaseModel):
    """What is kept of one server: its tokens, the registered client, and scopes that the next login asks for."""

    model_config = ConfigDict(hide_input_in_errors=True)

    server_url: str
    client: OAuthClientInformationFull | None = None
    tokens: Tokens | None = None
    missing_scope: str | None = None
    """Scopes that a call lacked."""


def state_folder() -> Path:
    """The folder of all logins: `mtrl/oauth` in `$XDG_STATE_HOME`, by default `~/.local/state`."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "mtrl" / "oauth"


class TokenFile:
    """The login of one server. It is found by name and address, so that another server never gets these tokens."""

    def __init__(self, name: str, server_url: str) -> None:
        self.server_url = server_url
        safe_name = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:64].lstrip(".") or "server"
        digest = hashlib.sha256(f"{name}\n{server_url}".encode()).hexdigest()[:16]
        self.path = state_folder() / f"{safe_name}-{digest}.json"

    def read(self) -> Login:
        """The stored login, an empty one if there is none; raises `AuthError` if others can read the file."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return Login(server_url=self.server_url)
        except OSError as error:
            raise AuthError(f"{self.path} cannot be read: {error.strerror}", f"remove {self.path}") from None
        with os.fdopen(descriptor, "rb") as file:
            state = os.fstat(file.fileno())
            if state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) & 0o077:
                reason = f"{self.path} holds tokens, and other users may read it"
                raise AuthError(reason, f"chmod 600 {self.path}, or remove it and log in again")
            content = file.read(_MAX_FILE_BYTES)
        try:
            login = Login.model_validate_json(content)
        except ValidationError:
            raise AuthError(f"{self.path} is damaged", f"remove {self.path} and log in again") from None
        return login if login.server_url == self.server_url else Login(server_url=self.server_url)

    def write(self, login: Login) -> None:
        """Replaces the file as a whole, so that a reader never sees half of it."""
        self._make_folder()
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        with suppress(FileNotFoundError):
            temporary.unlink()
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(login.model_dump_json(exclude_none=True))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise AuthError(
                f"{self.path} cannot be written: {error.strerror}", "make room, or set XDG_STATE_HOME"
            ) from None

    def remove(self) -> bool:
        """Whether there was a login."""
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        return True

    def _make_folder(self) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{self.path.parent} cannot be made: {error.strerror}"
            raise AuthError(reason, "set XDG_STATE_HOME to a folder of yours") from None

    @asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Keeps other processes from renewing; the system releases it even if this process is killed."""
        self._make_folder()
        path = self.path.with_suffix(".lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with anyio.move_on_after(LOCK_S) as waiting:
                while not try_lock(descriptor):  # noqa: ASYNC110 (another process holds it)
                    await anyio.sleep(_POLL_S)
            if waiting.cancelled_caught:
                raise AuthError(f"another process has held {path} for {LOCK_S:g} s", "end it, or try again later")
            yield
        finally:
            os.close(descriptor)
