"""The settings of a provider of sandboxes other than bubblewrap, which a plug-in adds to `sandbox:`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gateway.config.base import FrozenModel

if TYPE_CHECKING:
    from gateway.process.reaper import Reaper
    from gateway.sandbox.provider import SandboxProvider
    from gateway.sandbox.sandbox_settings import SandboxSettings


class ProviderSettings(FrozenModel):
    """A section of `sandbox:` that names a provider."""

    key: ClassVar[str]
    """The section's name."""
    is_local: ClassVar[bool] = True
    """Whether paths of this machine exist for its sandboxes."""

    def open(self, reaper: Reaper) -> SandboxProvider:
        """The provider; whatever it starts ends with the reaper."""
        raise NotImplementedError

    def describe(self) -> str:
        """The provider, for people."""
        raise NotImplementedError

    def check(self, settings: SandboxSettings) -> None:
        """Raises ValueError for settings beside the section that the provider cannot do."""

    def find_problem(self) -> str | None:
        """Why no sandbox can be started, with what to do; None if one can. May take a moment."""
        raise NotImplementedError

    def find_path_problem(self, path: Path) -> str:
        """Why a path cannot be seen inside; empty if it can."""
        return ""
