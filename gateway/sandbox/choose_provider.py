"""Which provider starts the sandboxes of an entry, and whether it can."""

from __future__ import annotations

from gateway.errors import ConfigError
from gateway.process.reaper import Reaper
from gateway.sandbox.bubblewrap import find_problem
from gateway.sandbox.provider import BubblewrapProvider, SandboxProvider
from gateway.sandbox.roots import find_root
from gateway.sandbox.sandbox_settings import SandboxSettings


def choose_provider(settings: SandboxSettings, reaper: Reaper) -> SandboxProvider:
    """The provider that the settings name; bubblewrap by default."""
    return BubblewrapProvider(reaper) if settings.provider is None else settings.provider.open(reaper)


def describe_provider(settings: SandboxSettings) -> str:
    """The provider's name, for people."""
    root = f" with the root {settings.root}" if settings.root else ""
    return ("bubblewrap" if settings.provider is None else settings.provider.describe()) + root


def find_provider_problem(settings: SandboxSettings) -> str | None:
    """Why the provider cannot start sandboxes, with what to do; None if it can. It takes a moment."""
    try:
        if settings.root and (settings.provider is None or settings.provider.is_local):
            find_root(settings.root)
    except ConfigError as error:
        return str(error)
    return find_problem() if settings.provider is None else settings.provider.find_problem()
