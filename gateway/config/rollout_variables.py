"""`${MTRL_ROLLOUT_DIR}`, `${MTRL_ROLLOUT_ID}` and `${MTRL_SEED}`: what a server process of one rollout is started with.

Configuration files keep them as they are written; they get their values when a rollout's process starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gateway.config.models import Server
from gateway.state.prepared_state import is_prepared_state

FOLDER, ID, SEED = "MTRL_ROLLOUT_DIR", "MTRL_ROLLOUT_ID", "MTRL_SEED"
_PATTERN = re.compile(rf"\$\{{({FOLDER}|{ID}|{SEED})(?::-([^}}]*))?\}}")


class RolloutProblem(NamedTuple):
    """What is wrong with a server's settings for single rollouts."""

    field: str
    problem: str
    remedy: str


def expand_rollout_variables(text: str, values: Mapping[str, str]) -> str:
    """The text with the values of a rollout; an empty value is replaced by the default, as in a shell."""
    return _PATTERN.sub(lambda match: values.get(match[1]) or match[2] or "", text)


def used_variables(server: Server) -> dict[str, str]:
    """The variables that a server's settings use, each with the field that uses it."""
    return {match[1]: field for field, text in _texts(server) for match in _PATTERN.finditer(text)}


def needs_folder(server: Server) -> bool:
    """Whether each process gets a folder of its own."""
    return FOLDER in used_variables(server)


def needs_rollout(server: Server) -> bool:
    """Whether a process can be started only for a rollout that is known."""
    has_own_folder = server.keep_state is not None or server.states is not None
    return has_own_folder or not used_variables(server).keys().isdisjoint((ID, SEED))


def _texts(server: Server) -> Iterator[tuple[str, str]]:
    yield "command", server.command or ""
    yield from (("args", text) for text in server.args)
    yield from (("env", text) for text in server.env.values())
    yield "cwd", str(server.cwd or "")


def find_rollout_problem(server: Server) -> RolloutProblem | None:
    """The first setting for single rollouts that cannot work."""
    used = used_variables(server)
    if used and server.isolation not in ("process", "sandbox"):
        name, field = next(iter(used.items()))
        problem = f"`${{{name}}}` belongs to one rollout, but with `isolation: {server.isolation}` no process does"
        return RolloutProblem(field, problem, "write `isolation: process`, so that each rollout has a process")
    for field in ("state", "states", "state_ignore", "keep_state"):
        if getattr(server, field) and FOLDER not in used:
            problem = f"`{field}` is for the folder of a rollout, which this server is not told"
            return RolloutProblem(field, problem, f"write `${{{FOLDER}}}` in its `args`, `env` or `cwd`")
    if server.state is not None and not is_prepared_state(server.state):
        remedy = "create it, or correct the path; archives end in .tar, .tar.gz or .zip"
        return RolloutProblem("state", "there is no such folder or archive", remedy)
    if server.states is not None and not server.states.is_dir():
        return RolloutProblem("states", "there is no such folder", "create it, or correct the path")
    if server.warm and needs_rollout(server):
        problem = "`warm` starts processes before their rollouts are known"
        return RolloutProblem(
            "warm", problem, f"remove `warm`, or use `${{{FOLDER}}}` only, without `states` and `keep_state`"
        )
    return None
