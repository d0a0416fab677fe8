"""The folder of one rollout's server process: made before the start, seeded, and removed at the end.

The policy reads and writes the folder's path as `/rollout`, since a random path would be other tokens each time.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

import anyio
from anyio import to_thread

from gateway.config.models import Server
from gateway.config.rollout_variables import FOLDER, ID, SEED, expand_rollout_variables, needs_folder
from gateway.process.reaper import Reaper
from gateway.schema import safe_name
from gateway.state.prepared_state import StateError, copy_state, find_prepared_state
from gateway.state.remove_folder import remove_folder
from gateway.types import Task

PREFIX = "mtrl-rollout-"
REMOVE_S = 10.0
"""How long the end of a connection waits for its folder to be removed."""
POLICY_PATH = "/rollout"
_POLICY_PATH = re.compile(rf"(?<![\w./~-]){POLICY_PATH}(?![\w-])")


@dataclass(frozen=True)
class RolloutIdentity:
    """The rollout that a process is started for."""

    id: str
    seed: int
    state: str = ""
    """The name of the state that its task begins from, if not the server's."""

    @classmethod
    def of_task(cls, task: Task) -> RolloutIdentity:
        """The seed comes from the task's id, so that rollouts that are compared begin alike."""
        seed = int.from_bytes(sha256(task.id.encode("utf-8", "surrogatepass")).digest()[:4], "big") >> 1
        name = safe_name(task.rollout or task.id or f"rollout-{token_hex(8)}")
        return cls(name, seed if task.id else 0, task.state)


LISTING = RolloutIdentity("listing", 0)
"""The process that is asked for the list of tools, which no rollout uses where processes are started for rollouts."""


class FolderError(Exception):
    """The folder of a rollout cannot be made."""


@asynccontextmanager
async def open_folder(config: Server, rollout: RolloutIdentity, reaper: Reaper) -> AsyncIterator[Path | None]:
    """The folder of one process, if it uses one. It is removed at the end, even if the gateway is killed, or kept."""
    if not needs_folder(config):
        yield None
        return
    await reaper.start()
    keep = config.keep_state if rollout is not LISTING else None
    try:
        folder = await to_thread.run_sync(_make_folder, keep, rollout.id)
    except OSError as error:
        raise FolderError(f"a folder for its rollout cannot be made: {error}") from error
    if keep is None:
        reaper.add_folder(folder)
    try:
        await to_thread.run_sync(_prepare, config, rollout, folder, abandon_on_cancel=True)
        yield folder
    finally:
        if keep is None:
            with anyio.move_on_after(REMOVE_S, shield=True):
                await to_thread.run_sync(remove_folder, folder, abandon_on_cancel=True)
                reaper.remove_folder(folder)


def _make_folder(keep: Path | None, name: str) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
    keep.mkdir(parents=True, exist_ok=True)
    for suffix in ("", *(f"-{number}" for number in range(2, 10_000))):
        with suppress(FileExistsError):
            folder = keep.resolve() / f"{name}{suffix}"
            folder.mkdir(mode=0o700)
            return folder
    raise FileExistsError(f"{keep / name} exists 10,000 times")


def _prepare(config: Server, rollout: RolloutIdentity, folder: Path) -> None:
    try:
        state = find_prepared_state(config.state, config.states, rollout.state)
        if state is not None:
            copy_state(state, folder)
    except (StateError, OSError) as error:
        raise FolderError(str(error)) from error


def is_inside(path: Path | None, folder: Path | None) -> bool:
    """Whether a path is in the folder of a rollout, if there are both."""
    return path is not None and folder is not None and path.is_relative_to(folder)


@dataclass(frozen=True)
class StartSettings:
    """What a process is started with."""

    command: tuple[str, ...]
    env: dict[str, str]
    cwd: Path | None


def resolve_start(config: Server, rollout: RolloutIdentity, folder: Path | None) -> StartSettings:
    """The settings with the values of a rollout. A `cwd` inside the folder is made."""
    values = {FOLDER: str(folder or ""), ID: rollout.id, SEED: str(rollout.seed)}

    def expand(text: str) -> str:
        return expand_rollout_variables(text, values)

    cwd = Path(expand(str(config.cwd))) if config.cwd is not None else None
    if cwd is not None and is_inside(cwd, folder):
        cwd.mkdir(parents=True, exist_ok=True)
    command = tuple(map(expand, (config.command or "", *config.args)))
    return StartSettings(command, {name: expand(text) for name, text in config.env.items()}, cwd)


def to_policy(value: Any, folder: Path | None) -> Any:
    """What a server says, with the path of its folder, if it has one, as the policy knows it."""
    if folder is None:
        return value
    path = str(folder)
    return _map_texts(value, lambda text: text.replace(path, POLICY_PATH) if path in text else text)


def to_server(value: Any, folder: Path) -> Any:
    """A policy's arguments with the folder's real path."""
    path = str(folder)
    return _map_texts(value, lambda text: _POLICY_PATH.sub(lambda _: path, text) if POLICY_PATH in text else text)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()}
    return [_map_texts(item, change) for item in value] if isinstance(value, list) else value
