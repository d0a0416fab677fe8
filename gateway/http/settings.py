"""Who may come in, and how much they may bring; alone on the loopback is the default, everything else is asked for."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr

from gateway.config.models import Frozen
from gateway.errors import ConfigError


class Settings(Frozen):
    host: str = "127.0.0.1"
    """The address to listen on; any but a loopback address needs a token."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8765
    """0 takes a free one."""
    token: SecretStr | None = None
    """What callers must send as `Authorization: Bearer ...`."""
    allow_hosts: tuple[str, ...] = ()
    """Further names, without port, under which callers may know us; browsers may come from pages of these too."""
    body_bytes: PositiveInt = 8 * 1024 * 1024
    """A longer request is refused while it is read."""
    tapes: Path | None = None
    """A folder whose tapes may be listed and looked at."""
    tape: Path | None = None
    """The tape that is recorded or played now, which may be looked at too."""
    ttl_s: PositiveFloat = 3600.0
    """A session that is not used for this long is closed, where it does not say otherwise itself."""


def read_token(file: Path) -> SecretStr:
    """The token in a file, which no command line and no process list shows."""
    try:
        token = file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", file=file, remedy="name a file with one token"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError("holds more than ASCII", file=file, remedy="write a token of letters and digits") from error
    if not token or any(sign.isspace() for sign in token):
        raise ConfigError("is not one token", file=file, remedy="write one line without spaces, 32 signs or more")
    return SecretStr(token)


def refuse_open_door(settings: Settings) -> None:
    """Whoever can reach the port can run the tools, so an address that others reach needs a token."""
    if settings.token is None and not is_loopback(settings.host):
        raise ConfigError(
            f"{settings.host} can be reached from other machines, and there is no token",
            field="host",
            remedy="name a file with a token (`--token-file`), or listen on 127.0.0.1",
        )


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
