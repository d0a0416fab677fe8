"""Credentials from a command of the operator, such as `gcloud auth print-access-token`; run again when needed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

from anyio import to_thread

from gateway.mcp_client.auth.credentials import AuthError, Challenge, Credentials, check_header
from gateway.process.spawn import CommandError, run_command

COMMAND_S = 30.0
"""Deadline of the command."""


class CommandCredentials(Credentials):
    """What a command prints: a token on one line, or a JSON object of headers."""

    def __init__(self, command: Sequence[str], refresh_s: float | None) -> None:
        super().__init__()
        self._command, self._refresh_s = tuple(command), refresh_s
        self._fetched_at: float | None = None
        self.remedy = f"run the `auth_command` ({self._command[0]}) by hand to see why"

    def needs_renewal(self) -> bool:
        if self._fetched_at is None:
            return True
        return self._refresh_s is not None and time.monotonic() - self._fetched_at > self._refresh_s

    def has_expired(self) -> bool:
        return self._fetched_at is None

    async def fetch(self, challenge: Challenge | None) -> Mapping[str, str]:
        if challenge is not None and challenge.is_step_up:
            raise AuthError("the token of `auth_command` lacks a scope that the server asks for", self.remedy)
        try:
            headers = parse_output(await read_output(self._command))
        except ValueError as error:
            raise AuthError(f"`auth_command` {error}", self.remedy) from None
        self._fetched_at = time.monotonic()
        return headers


def parse_output(output: bytes) -> dict[str, str]:
    """The headers in a command's output. Errors never quote the output."""
    try:
        text = output.decode().strip()
    except UnicodeDecodeError:
        raise ValueError("printed something that is not text") from None
    if not text:
        raise ValueError("printed nothing")
    if not text.startswith("{"):
        if len(text.split()) != 1:
            raise ValueError("printed more than one word: it must print a token alone, or a JSON object of headers")
        return dict([check_header("Authorization", f"Bearer {text}")])
    try:
        headers = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("printed a `{` that does not begin a JSON object") from None
    if not all(isinstance(value, str) for value in headers.values()):
        raise ValueError("printed headers whose values are not all text")
    return dict(check_header(name, value) for name, value in headers.items())


async def read_output(command: Sequence[str]) -> bytes:
    """What a program prints, with a deadline and a limit; raises ValueError, without its output."""
    try:
        done = await to_thread.run_sync(run_command, command, COMMAND_S, abandon_on_cancel=True)
    except CommandError as error:
        raise ValueError(f"failed: {error}") from None
    except OSError as error:
        raise ValueError(f"cannot be started: {error.strerror}") from None
    if done.status != 0:
        raise ValueError(f"ended with status {done.status}")
    return done.output
