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

from gateway.errors import ConfigError, format_error

if TYPE_CHECKING:
    from gateway.import_hook import StandInFinder

GROUP = "mtrl.plugins"
SHIPPED: Mapping[str, tuple[str, ...]] = {
    "agents": ("agent",),
    "client_files": (),
    "cluster": ("render", "wait-for-servers", "--ray", "--ray-servers"),
    "demo": ("demo", "sight", "shelves", "shell"),
    "environments": ("environment",),
    "harbor": ("harbor",),
    "history": ("history", "delegate"),
    "judge": ("judge",),
    "sandboxes": ("container", "remote", "sandboxes"),
    "scripts": ("scripts", "translate", "--verl-config", "--swift"),
    "starter": ("init",),
    "swift": ("swift",),
    "task_maker": ("make-tasks",),
    "trl": ("trl",),
    "verifiers": ("verifiers",),
    "verl": ("verl",),
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
    rewards: Mapping[str, str] = field(default_factory=dict)
    """Reward functions that `function` names: name -> a function, or a class of objects that are called."""
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
    plugins: dict[str, Plugin] = {}
    for entry in entry_points(group=GROUP):
        package = entry.dist.name if entry.dist else entry.module
        try:
            plugin = entry.load()
        except Exception as error:  # boundary: a third party's module may raise anything
            if isinstance(error, ModuleNotFoundError) and f"{entry.module}.".startswith(f"{error.name}."):
                continue
            problem = f"the plug-in {entry.name!r} cannot be loaded: {format_error(error)}"
            raise ConfigError(problem, remedy=f"update {package}, or uninstall it") from error
        if not isinstance(plugin, Plugin):
            problem = f"the plug-in {entry.name!r} is no gateway.plugins.Plugin, but a {type(plugin).__name__}"
            raise ConfigError(problem, remedy=f"update {package}, or uninstall it")
        plugins[entry.name] = plugin
    return tuple(plugins[name] for name in sorted(plugins))


def load_name(name: str) -> Any:
    """Imports `module:name`, or a module."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute) if attribute else import_module(module)


def find_all(select: Callable[[Plugin], Mapping[str, str]]) -> dict[str, str]:
    """What all plug-ins add of one kind, by name. Raises ConfigError if two add the same name."""
    found: dict[str, str] = {}
    for plugin in installed_plugins():
        if twice := found.keys() & select(plugin).keys():
            problem = f"the plug-in {plugin.name!r} adds what another one adds, too: {', '.join(sorted(twice))}"
            raise ConfigError(problem, remedy="uninstall one of them")
        found |= select(plugin)
    return found


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
