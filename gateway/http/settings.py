"""Settings of the HTTP server: address, token, allowed hosts and limits."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr

from gateway.config.base import FrozenModel
from gateway.errors import ConfigError

ORIGIN = r"^https?://[^/?#@\s]+$"


class Settings(FrozenModel):
    """Settings of the HTTP server; the default listens on the loopback address only, without a token."""

    host: str = "127.0.0.1"
    """The address to listen on; an address other than loopback needs a token."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8765
    """The port to listen on; 0 takes a free one."""
    callers: Path | None = None
    """JSON file of several callers, with a token and rights for each, in place of `token`."""
    token: SecretStr | None = None
    """Token that clients must send as `Authorization: Bearer ...`."""
    allow_hosts: tuple[str, ...] = ()
    """Further host names of this server, without port, such as a proxy's; web pages of these hosts may call it."""
    allow_origins: tuple[Annotated[str, Field(pattern=ORIGIN)], ...] = ()
    """Origins of other servers, such as `http://localhost:3000`, whose web pages may call this one."""
    body_bytes: PositiveInt = 8 * 1024 * 1024
    """Maximum size of a request body."""
    head_bytes: PositiveInt = 32 * 1024
    """Maximum size of a request's headers and path together."""
    head_fields: PositiveInt = 100
    """Maximum number of a request's headers."""
    head_s: PositiveFloat = 10.0
    """Time within which a connection must send the headers of a request."""
    body_s: PositiveFloat = 30.0
    """Time within which a body must arrive, and a second more for every 64 KiB of it that did."""
    ttl_s: PositiveFloat = 3600.0
    """Idle time after which a session is closed, unless it sets its own."""


def check_origins(origins: Iterable[str]) -> None:
    """Raises if one is no origin as browsers send it: scheme, host and port."""
    for origin in origins:
        if re.match(ORIGIN, origin) is None:
            remedy = "write scheme, host and port only, such as http://localhost:3000"
            raise ConfigError(f"{origin!r} is no origin", field="allow-origin", remedy=remedy)


def read_token(file: Path) -> SecretStr:
    """Reads the token from a file, so that it appears on no command line and in no process list."""
    try:
        token = file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", file=file, remedy="name a file with one token"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError("is not ASCII text", file=file, remedy="write a token of letters and digits") from error
    if not token or any(char.isspace() for char in token):
        remedy = "write one line without spaces, 32 characters or more"
        raise ConfigError("does not contain one token", file=file, remedy=remedy)
    return SecretStr(token)


def check_token_required(settings: Settings) -> None:
    """Raises if other machines can reach the address and there is no token: anybody could run the tools."""
    if settings.token is None and settings.callers is None and not is_loopback(settings.host):
        raise ConfigError(
            f"{settings.host} can be reached from other machines, but there is no token",
            field="host",
            remedy="give a file with a token (`--token-file`) or with several (`--callers`), or listen on 127.0.0.1",
        )


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
