"""Credentials from a command of the operator, such as `gcloud auth print-access-token`; run again when needed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from subprocess import DEVNULL, PIPE

import anyio

from gateway.mcp_client.auth.credentials import AuthError, Challenge, Credentials, check_header
from gateway.process.pipe_process import ReadPipe, wait_for_exit
from gateway.process.spawn import kill_group, spawn

COMMAND_S = 30.0
"""Deadline of the command."""
MAX_OUTPUT_BYTES = 64 * 1024
_END_S = 2.0


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
            headers = parse_output(await run_command(self._command))
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


async def run_command(command: Sequence[str]) -> bytes:
    """What a program prints, with a deadline and at most `MAX_OUTPUT_BYTES`; raises ValueError, without its output."""
    try:
        process = spawn(command, stdout=PIPE, stderr=DEVNULL)
    except OSError as error:
        raise ValueError(f"cannot be started: {error.strerror}") from None
    stdout = ReadPipe(process.stdout)
    try:
        with anyio.fail_after(COMMAND_S):
            output = await _read_output(stdout)
            await wait_for_exit(process, COMMAND_S)
    except TimeoutError:
        raise ValueError(f"did not end within {COMMAND_S:g} s") from None
    finally:
        stdout.close()
        if process.poll() is None:
            kill_group(process.pid)
            with anyio.CancelScope(shield=True):
                await wait_for_exit(process, _END_S)
    if process.returncode != 0:
        raise ValueError(f"ended with status {process.returncode}")
    return output


async def _read_output(stdout: ReadPipe) -> bytes:
    output = bytearray()
    while chunk := await stdout.receive():
        output += chunk
        if len(output) > MAX_OUTPUT_BYTES:
            raise ValueError(f"printed more than {MAX_OUTPUT_BYTES} bytes")
    return bytes(output)
