"""Settings of the providers `container` and `remote`."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from gateway.config.base import rule_error
from gateway.sandbox.provider_settings import ProviderSettings

if TYPE_CHECKING:
    from gateway.process.reaper import Reaper
    from gateway.sandbox.provider import SandboxProvider
    from gateway.sandbox.sandbox_settings import SandboxSettings


SANDBOXES_VARIABLE, SANDBOX_TOKEN_VARIABLE = "MTRL_SANDBOXES", "MTRL_SANDBOX_TOKEN"
ADDRESS = r"https?://[^/?#@,\s]+(/[^?#,\s]*)?"


def _check_engine(value: str) -> str:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise rule_error(f"`engine` cannot be read as a command: {error}", "close its quotes") from error
    if not words or any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
        raise rule_error("`engine` is no command", "write `podman` or `docker`, or remove it")
    return value


def _check_addresses(value: str) -> str:
    from httpx2 import URL, InvalidURL  # Most jobs have no other machines.

    for address in value.split(","):
        try:
            parts = urlsplit(address)
            (parts.hostname or "").encode("idna")
            is_one = bool(parts.hostname) and parts.port != 0 and bool(URL(address).host)
        except (ValueError, InvalidURL):  # UnicodeError is a ValueError.
            is_one = False
        if not is_one:
            raise rule_error(f"{address!r:.80} is no address", "write `http://HOST:PORT`")
    return value


class ContainerSettings(ProviderSettings):
    """Runs the tools `python`, `shell` and `files` in a container, instead of in bubblewrap."""

    key: ClassVar[str] = "container"

    image: str = ""
    """The image; it needs Python 3.11 or newer, and bash for the tool `shell`. It is never pulled by itself. Left out
    where a `root` is named beside `container`, which needs no Python."""
    engine: Annotated[str, AfterValidator(_check_engine)] = "podman"
    """The command of the engine: `podman`, `docker`, or one with options, such as `podman --runtime runsc`."""
    python: Annotated[str, Field(min_length=1)] = "python3"
    """The interpreter in the image."""
    options: tuple[str, ...] = ()
    """Further options of the engine's `run`."""

    def open(self, reaper: Reaper) -> SandboxProvider:
        from mtrl_plugins.sandboxes.container_provider import ContainerProvider

        return ContainerProvider(self, reaper)

    def describe(self) -> str:
        return f"containers of {self.engine}{f' from {self.image}' if self.image else ''}"

    def check(self, settings: SandboxSettings) -> None:
        if bool(self.image) == bool(settings.root):
            raise rule_error("a container has either an `image` or a `root`", "write one of them")

    def find_problem(self) -> str | None:
        from mtrl_plugins.sandboxes.container_provider import find_container_problem

        return find_container_problem(self)

    def find_path_problem(self, path: Path) -> str:
        return "it has a `:`, with which container engines separate paths" if ":" in str(path) else ""


class RemoteSettings(ProviderSettings):
    """Runs the tools `python`, `shell` and `files` on other machines, where `mtrl-gateway sandboxes` serves them."""

    key: ClassVar[str] = "remote"
    is_local: ClassVar[bool] = False

    url: Annotated[str, Field(pattern=f"^{ADDRESS}(,{ADDRESS})*$"), AfterValidator(_check_addresses)] | None = None
    """Its address; those of several machines with commas between them. A name of several addresses is as many.
    Without it, both come from MTRL_SANDBOXES and MTRL_SANDBOX_TOKEN, as in jobs with `render ... --sandboxes N`."""
    token: SecretStr | None = None
    """Sent as `Authorization: Bearer ...`."""

    def open(self, reaper: Reaper) -> SandboxProvider:
        from mtrl_plugins.sandboxes.remote_provider import RemoteProvider

        return RemoteProvider(self)

    @property
    def urls(self) -> tuple[str, ...]:
        """Its addresses."""
        addresses = self.url or os.environ.get(SANDBOXES_VARIABLE)
        return tuple(addresses.split(",")) if addresses else ()

    @property
    def sent_token(self) -> str:
        """The token, or that of the job where its addresses are used, too."""
        if self.token is not None:
            return self.token.get_secret_value()
        return os.environ.get(SANDBOX_TOKEN_VARIABLE, "") if self.url is None else ""

    @model_validator(mode="after")
    def _check_variable(self) -> Self:
        for address in self.urls:
            if not re.fullmatch(ADDRESS, address):
                raise rule_error(f"{address!r:.80} is no address", f"correct {SANDBOXES_VARIABLE}")
            _check_addresses(address)
        return self

    def describe(self) -> str:
        return f"the server at {self.urls[0]}" if len(self.urls) == 1 else f"{len(self.urls)} servers"

    def find_problem(self) -> str | None:
        from mtrl_plugins.sandboxes.machines import find_remote_problem

        return find_remote_problem(self)
