"""Opens the server that tasks are made from, and says what is missing where its state cannot be reset."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from gateway.config.diagnostics import closest_match
from gateway.config.models import Server as ServerConfig
from gateway.errors import ConfigError
from gateway.state.state_hash import POLICY_PATH
from mtrl_plugins.task_maker.server_sessions import Server
from mtrl_plugins.task_maker.values import Value, is_usable
from trainer.setup import ServerGateway, open_server_gateway

MAX_PATHS = 500

RESET_REMEDY = (
    'write `"isolation": "process"` (or `sandbox`), and `${MTRL_ROLLOUT_DIR}` where the server keeps its files, so that'
    " each rollout starts it anew"
)


@asynccontextmanager
async def open_server(mcp: Path, name: str, state: str | None, tools: tuple[str, ...]) -> AsyncIterator[Server]:
    """The server of a servers file. Raises ConfigError with what to do where tasks cannot be made from it."""
    async with open_server_gateway(mcp, name) as opened:
        config, has_folder = opened.config, opened.has_folder
        if config.isolation not in ("process", "sandbox"):
            problem = f"its state cannot be reset: all rollouts use one process (`isolation: {config.isolation}`)"
            raise ConfigError(problem, file=mcp, field=f"mcpServers.{name}.isolation", remedy=RESET_REMEDY)
        if opened.problem:
            raise ConfigError(f"server {name!r} is down: {opened.problem}", file=mcp, remedy="see `mtrl-gateway check`")
        specs = {spec.name: spec for spec in opened.gateway.specs if spec.audience == "policy"}
        _check_tools(tools, specs, opened.unusable_tools)
        chosen = {key: spec for key, spec in specs.items() if not tools or key in tools}
        if not chosen:
            reasons = "".join(f"; {tool}: {reason}" for tool, reason in opened.unusable_tools.items())
            remedy = "correct these tools" if reasons else "see `mtrl-gateway list`"
            raise ConfigError(f"server {name!r} offers no tools{reasons}", file=mcp, remedy=remedy)
        states = _states(config, opened, state)
        files = {one: tuple(_paths(opened.find_state(one))) for one in states} if has_folder else {}
        is_prepared = config.state is not None or config.states is not None
        yield Server(opened.gateway, name, chosen, has_folder, states, files, is_prepared)


def describe_server(server: Server) -> str:
    """What tasks can be made from, and what limits them."""
    text = f"server {server.name}: {len(server.specs)} tools"
    if not server.has_folder:
        return (
            f"{text}; its entry has no ${{MTRL_ROLLOUT_DIR}}, so that its state cannot be compared: only answers are"
            " graded, and what its tools change does not count"
        )
    if server.states == ("",) and not server.is_prepared:
        return f"{text}; every task begins with an empty folder, since its entry has no `state`"
    return f"{text}, {len(server.states)} prepared state{'s' * (len(server.states) > 1)}"


def _paths(folder: Path | None) -> Iterator[Value]:
    """The paths in a prepared folder as the policy knows them; none of an archive."""
    if folder is None or not folder.is_dir():
        return
    for path in islice(sorted(folder.rglob("*")), MAX_PATHS):
        inside = path.relative_to(folder)
        if is_usable(str(inside)) and not any(part.startswith(".") for part in inside.parts):
            yield Value(f"{POLICY_PATH}/{inside.as_posix()}", "directory" if path.is_dir() else "file")
            yield Value(inside.as_posix(), "relative_directory" if path.is_dir() else "relative_file")


def _check_tools(tools: tuple[str, ...], specs: Mapping[str, Any], unusable: Mapping[str, str]) -> None:
    for tool in tools:
        if tool in unusable and tool not in specs:
            problem = f"the tool {tool!r} cannot be offered: {unusable[tool]}"
            raise ConfigError(problem, field="--tool", remedy="correct it in the server")
        if tool not in specs:
            close = closest_match(tool, list(specs))
            remedy = f"did you mean {close!r}?" if close else f"it offers: {', '.join(specs)}"
            raise ConfigError(f"the server has no tool {tool!r}", field="--tool", remedy=remedy)


def _states(config: ServerConfig, opened: ServerGateway, state: str | None) -> tuple[str, ...]:
    names = opened.state_names if config.states is not None else ()
    if state is not None and state not in names:
        close = closest_match(state, list(names))
        known = f"there are: {', '.join(names)}" if names else "give the server a folder of them with `states`"
        remedy = f"did you mean {close!r}?" if close else known
        raise ConfigError(f"the server has no state {state!r}", field="--state", remedy=remedy)
    if state is not None:
        return (state,)
    return opened.state_names if config.states is not None and opened.state_names else ("",)


def read_examples(file: Path | None) -> dict[str, list[Mapping[str, Any]]]:
    """Examples of arguments by tool, from lines of {"tool": ..., "arguments": {...}}."""
    examples: dict[str, list[Mapping[str, Any]]] = {}
    for number, line in enumerate([] if file is None else _lines(file), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            tool, arguments = value["tool"], value["arguments"]
            if not isinstance(tool, str) or not isinstance(arguments, dict):
                raise TypeError("`tool` is a text and `arguments` an object")
        except (ValueError, KeyError, TypeError) as error:
            remedy = 'write {"tool": "read_query", "arguments": {"query": "SELECT ..."}}'
            raise ConfigError(f"is no example: {error}", file=f"{file}:{number}", remedy=remedy) from error
        examples.setdefault(tool, []).append(arguments)
    return examples


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot be read: {error}", file=file, field="--examples") from error
