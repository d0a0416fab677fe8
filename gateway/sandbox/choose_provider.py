"""Which provider starts the sandboxes of an entry, and whether it can."""

from __future__ import annotations

from gateway.mcp_client.reaper import Reaper
from gateway.sandbox.bubblewrap import find_problem
from gateway.sandbox.container_provider import ContainerProvider, find_container_problem
from gateway.sandbox.provider import BubblewrapProvider, SandboxProvider
from gateway.sandbox.remote_provider import RemoteProvider, find_remote_problem
from gateway.sandbox.sandbox_settings import SandboxSettings


def choose_provider(settings: SandboxSettings, reaper: Reaper) -> SandboxProvider:
    """The provider that the settings name; bubblewrap by default."""
    if settings.container is not None:
        return ContainerProvider(settings.container, reaper)
    if settings.remote is not None:
        return RemoteProvider(settings.remote)
    return BubblewrapProvider(reaper)


def describe_provider(settings: SandboxSettings) -> str:
    """The provider's name, for people."""
    if settings.container is not None:
        return f"containers of {settings.container.engine} from {settings.container.image}"
    return f"the server at {settings.remote.url}" if settings.remote is not None else "bubblewrap"


def find_provider_problem(settings: SandboxSettings) -> str | None:
    """Why the provider cannot start sandboxes, with what to do; None if it can. It takes a moment."""
    if settings.container is not None:
        return find_container_problem(settings.container)
    if settings.remote is not None:
        return find_remote_problem(settings.remote)
    return find_problem()
