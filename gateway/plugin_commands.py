"""Command lines to which plug-ins add commands and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from typer.core import TyperGroup

from gateway.errors import ConfigError
from gateway.plugins import Plugin, find_missing, installed_plugins, load_name


class PluginGroup(TyperGroup):
    """A group of commands that names the plug-in which a missing command or option needs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for param in self.params for name in param.opts}
        for word in (arg.partition("=")[0] for arg in args if arg.startswith("--")):
            if word not in known and (plugin := find_missing(word)):
                ctx.fail(f"{word} needs the plug-in {plugin!r}, which is not installed.")
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and (plugin := find_missing(args[0])):
            ctx.fail(f"{args[0]!r} needs the plug-in {plugin!r}, which is not installed.")
        return super().resolve_command(ctx, args)


def load_commands(select: Callable[[Plugin], Iterable[str]]) -> None:
    """Imports the modules with which plug-ins add commands to a program."""
    try:
        for plugin in installed_plugins():
            for module in select(plugin):
                load_name(module)
    except ConfigError as error:  # No command can report it: there is none yet.
        raise SystemExit(f"mtrl: {error}") from None
