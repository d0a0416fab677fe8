"""Plug-ins: what only some jobs need, found by entry points of the group `mtrl.plugins`.

An entry point leads to a `Plugin`, in a module that imports nothing heavy. It names what it adds as `module:name`; each
name is imported when a file, a command or a job asks for it. The core imports no plug-in, and works without any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.import_hook import StandInFinder

GROUP = "mtrl.plugins"
SHIPPED: Mapping[str, tuple[str, ...]] = {
    "agents": ("agent", "serve-policy"),
    "client_files": ("import",),
    "cluster": ("render", "wait-for-servers", "--ray", "--ray-servers"),
    "demo": ("demo", "sight", "shelves"),
    "environments": ("environment", "gymnasium", "textarena", "openenv", "env"),
    "plan": ("plan",),
    "sandboxes": ("container", "remote", "sandboxes"),
    "scripts": ("translate", "--verl-config", "--swift"),
    "starter": ("init",),
    "task_maker": ("make-tasks",),
    "verifiers": ("verifiers",),
    "web": ("view", "--view"),
    "workers": ("rollout", "worker"),
}
"""The settings, names, commands and options of plug-ins that come with mtrl, so that a missing one can be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """What a plug-in adds. Objects are named as `module:name`."""

    name: str
    run_sections: Mapping[str, str] = field(default_factory=dict)
    """Sections of run files, for rollouts and for training: key -> a `trainer.rollout.run_part.RunPart`."""
    train_sections: Mapping[str, str] = field(default_factory=dict)
    """Sections of run files for training alone."""
    environments: Mapping[str, str] = field(default_factory=dict)
    """Frameworks of environments: name -> its settings."""
    sandboxes: Mapping[str, str] = field(default_factory=dict)
    """Providers of sandboxes: key in `sandbox:` -> a `gateway.sandbox.provider.ProviderSettings`."""
    examples: Mapping[str, str] = field(default_factory=dict)
    """Names for `model` and `data` that are no files: name -> a `trainer.data.tasks.Example`."""
    jobs: Path | None = None
    """A folder of run files that can be named without their path."""
    steppers: tuple[str, ...] = ()
    """Functions that make a stepper of another framework's object, or return None."""
    servers_files: tuple[str, ...] = ()
    """Functions that translate servers files of other MCP clients."""
    stand_ins: tuple[str, ...] = ()
    """Finders for another package's names, which users' files import without that package."""
    gateway_commands: tuple[str, ...] = ()
    """Modules that add commands to `mtrl-gateway`."""
    train_commands: tuple[str, ...] = ()
    """Modules that add commands and options to `mtrl-train`."""


@cache
def installed_plugins() -> tuple[Plugin, ...]:
    """The plug-ins of this Python, by name. One whose module is gone is left out."""
    plugins = {}
    for entry in entry_points(group=GROUP):
        try:
            plugins[entry.name] = entry.load()
        except ModuleNotFoundError as error:
            if error.name is None or not f"{entry.module}.".startswith(f"{error.name}."):
                raise
    return tuple(plugins[name] for name in sorted(plugins))


def load_name(name: str) -> Any:
    """Imports `module:name`, or a module."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute) if attribute else import_module(module)


def find_all(select: Callable[[Plugin], Mapping[str, str]]) -> dict[str, str]:
    """What all plug-ins add of one kind, by name."""
    return {key: name for plugin in installed_plugins() for key, name in select(plugin).items()}


def find_missing(word: str) -> str | None:
    """The plug-in that a setting, a command or an option needs, if it comes with mtrl and is not there."""
    names = {plugin.name for plugin in installed_plugins()}
    return next((name for name, words in SHIPPED.items() if word in words and name not in names), None)


@cache
def _finders() -> tuple[StandInFinder, ...]:
    return tuple(load_name(name) for plugin in installed_plugins() for name in plugin.stand_ins)


@contextmanager
def enable_stand_ins(module: str = "", folders: Iterable[Path] = ()) -> Iterator[None]:
    """Lets `module`'s package and code in `folders` import stand-ins of other packages, in the block and later."""
    folders = tuple(folders)
    with ExitStack() as stack:
        for finder in _finders():
            stack.enter_context(finder.enabled(module, folders))
        yield
