"""Mutual proof of a shared token when a worker connects. The token itself is never sent, and no proof works twice."""

from __future__ import annotations

import hmac
import secrets
from typing import Any, TypeGuard

import anyio

from mtrl_plugins.workers.line_channel import ChannelError, LineChannel

TOKEN_VARIABLE = "MTRL_WORKER_TOKEN"  # noqa: S105 - a name
MIN_TOKEN_LENGTH = 16
PROTOCOL = 1
ANSWER_S = 30.0
"""How long each side may take to answer."""
GREETING_BYTES = 4096
"""The longest line before both sides have proved that they know the token."""


class StrangerError(ChannelError):
    """The other side is none that this process may work with; trying again does not help."""


def prove(token: str, role: str, *nonces: str) -> str:
    """A proof of the token for one connection; `role` keeps one side from repeating the other's."""
    return hmac.new(token.encode(), "/".join((role, *nonces)).encode(), "sha256").hexdigest()


async def accept_worker(channel: LineChannel, token: str, version: str) -> dict[str, Any]:
    """Asks a worker for its proof and gives one; returns its greeting. Raises ChannelError for a stranger."""
    most, channel.max_bytes = channel.max_bytes, GREETING_BYTES
    nonce = secrets.token_hex(16)
    await channel.send_now({"protocol": PROTOCOL, "mtrl": version, "nonce": nonce})
    greeting = await _receive_greeting(channel)
    its_nonce, proof = greeting.get("nonce"), greeting.get("proof")
    if not _is_ascii(its_nonce) or not _is_ascii(proof) or not _is_printable(greeting.get("name")):
        raise ChannelError("its greeting is not that of a worker")
    if not hmac.compare_digest(proof, prove(token, "worker", nonce, its_nonce)):
        await channel.send_now(
            {"refused": f"the token is another one; set {TOKEN_VARIABLE} as for the training process"}
        )
        raise ChannelError("it does not know the token")
    if greeting.get("mtrl") != version:
        await channel.send_now({"refused": f"the training process runs mtrl {version}; install the same"})
        raise ChannelError(f"it runs mtrl {greeting.get('mtrl')!r:.20}, not {version}")
    await channel.send_now({"proof": prove(token, "trainer", nonce, its_nonce)})
    channel.max_bytes = most
    return greeting


async def greet_trainer(channel: LineChannel, token: str, version: str, **about: Any) -> None:
    """Proves the token to the training process, and checks its proof. Raises StrangerError if one of them is refused,
    and ChannelError if the connection ends."""
    hello = await channel.receive(ANSWER_S)
    if hello.get("protocol") != PROTOCOL or not _is_ascii(hello.get("nonce")):
        raise StrangerError("no training process of this version of mtrl answers there")
    nonce = secrets.token_hex(16)
    proof = prove(token, "worker", hello["nonce"], nonce)
    await channel.send_now({**about, "mtrl": version, "nonce": nonce, "proof": proof})
    answer = await channel.receive(ANSWER_S)
    if "refused" in answer:
        raise StrangerError(str(answer["refused"])[:500])
    expected = prove(token, "trainer", hello["nonce"], nonce)
    its_proof = answer.get("proof")
    if not _is_ascii(its_proof) or not hmac.compare_digest(its_proof, expected):
        raise StrangerError("the training process does not know the token")


async def _receive_greeting(channel: LineChannel) -> dict[str, Any]:
    """The first message of a stranger, who must not hold a connection by sending it byte by byte."""
    try:
        with anyio.fail_after(ANSWER_S):
            return await channel.receive(ANSWER_S)
    except TimeoutError:
        raise ChannelError(f"it did not greet within {ANSWER_S:g} s") from None


def _is_ascii(value: Any) -> TypeGuard[str]:
    """Whether a value is text that can be encoded: JSON may hold lone surrogates."""
    return isinstance(value, str) and value.isascii()


def _is_printable(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()
