"""The adapter of Gymnasium in a host process: an environment's steps as calls of a tool, its observations as text.

Runs with the Python that has `gymnasium`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtrl_plugins.environments import gymnasium_spaces as spaces
    from mtrl_plugins.environments.host_server import HostError, import_framework, load_file
else:
    from host_server import HostError, import_framework, load_file

    spaces = load_file("gymnasium_spaces", Path(__file__).with_name("gymnasium_spaces.py"))

ACTION_NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pick up", "drop off"),
    "Blackjack": ("stick", "hit"),
}
"""Names of actions that Gymnasium's own documentation gives, by environment."""
HIGHLIGHT = re.compile(r"\x1b\[[\d;]*4[0-7][\d;]*m(.*?)\x1b\[0m", re.DOTALL)
COLOUR = re.compile(r"\x1b\[[\d;]*m")


class ActionError(Exception):
    """What the policy wrote is no action."""


def load(environment: str, args: dict[str, Any], endpoint: object) -> GymnasiumAdapter:
    """The environment with this id; a module that registers it may stand before a colon."""
    return GymnasiumAdapter(import_framework("gymnasium"), environment, args)


class GymnasiumAdapter:
    """One environment's id, with the tool that its action space becomes."""

    uses_global_random = False

    def __init__(self, gymnasium: Any, environment: str, args: Mapping[str, Any]) -> None:
        self.gymnasium, self.environment = gymnasium, environment
        self.names, self.args = tuple(args["action_names"]), dict(args["make"])
        probe = self._make({})
        if "render_mode" not in self.args and "ansi" in (probe.metadata.get("render_modes") or ()):
            self.args["render_mode"] = "ansi"
        self.names = self.names or self._find_names(probe)
        try:
            schema = spaces.action_schema(probe.action_space, self.names)
        except ValueError as error:
            raise HostError(str(error), "wrap the environment, so that its actions are plain values") from error
        finally:
            probe.close()
        parameters = {"type": "object", "properties": {"action": schema}, "required": ["action"]}
        text = f"Acts in the environment {environment}, and returns what happens."
        if self.names:
            text += f" Actions: {', '.join(self.names)}."
        self.tools = [
            {"name": "step", "description": text, "parameters": {**parameters, "additionalProperties": False}}
        ]

    async def __aenter__(self) -> GymnasiumAdapter:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def about(self) -> dict[str, Any]:
        """The release, and the tool."""
        return {"framework": f"gymnasium {version('gymnasium')}", "tools": self.tools}

    def make(self, options: Mapping[str, Any]) -> GymnasiumEpisode:
        """A new environment; `options` may change its arguments."""
        return GymnasiumEpisode(self._make(options), self.names, self.gymnasium.error.InvalidAction)

    def _make(self, options: Mapping[str, Any]) -> Any:
        """Unregistered names and refused arguments are the operator's to correct."""
        try:
            return self.gymnasium.make(self.environment, **{**self.args, **(options.get("args") or {})})
        except (self.gymnasium.error.Error, ImportError, TypeError) as error:
            remedy = (
                "correct the name, or `gymnasium.args`; for more packages: `mtrl-train env install gymnasium --add`"
            )
            raise HostError(f"{self.environment!r} cannot be made: {error}", remedy) from error

    def _find_names(self, probe: Any) -> tuple[str, ...]:
        """The names of a discrete space's actions, if the environment or its documentation has them."""
        if type(probe.action_space).__name__ != "Discrete":
            return ()
        count = int(probe.action_space.n)
        meanings = getattr(probe.unwrapped, "get_action_meanings", None)
        names = tuple(map(str, meanings())) if callable(meanings) else ()
        if not names and (getattr(probe.spec, "namespace", None) is None):
            names = ACTION_NAMES.get(getattr(probe.spec, "name", ""), ())
        return names if len(set(names)) == count else ()


class GymnasiumEpisode:
    """One environment from its `reset` on."""

    def __init__(self, environment: Any, names: tuple[str, ...], invalid_action: type[Exception]) -> None:
        self.environment, self.names, self.invalid_action = environment, names, invalid_action

    def reset(self, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Begins the episode."""
        self.environment.action_space.seed(seed)
        observation, _ = self.environment.reset(seed=seed, options=options.get("options"))
        return {"parts": self._describe(observation)}

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Takes a step; an action outside of the space, or one that the environment refuses as Gymnasium says, is the
        policy's mistake, and no step."""
        try:
            decoded = self._read(action)
            observation, reward, terminated, truncated, _ = self.environment.step(decoded)
        except (ActionError, self.invalid_action) as error:
            return {"invalid": f"This is no action: {error}"}
        ended = {"terminated": bool(terminated), "truncated": bool(truncated)}
        return {"parts": self._describe(observation), "reward": float(reward), **ended}

    def _read(self, action: Mapping[str, Any]) -> Any:
        """The action as the space has it. Raises ActionError for what is none, however the policy wrote it."""
        try:
            value = self._read_text(action["text"]) if "text" in action else action["action"]
            return spaces.read_action(self.environment.action_space, value, self.names)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise ActionError(str(error)) from error

    def close(self) -> None:
        """Releases what the environment holds."""
        self.environment.close()

    def _describe(self, observation: Any) -> list[dict[str, Any]]:
        """The observation, and what the environment renders as text or as an image."""
        parts: list[dict[str, Any]] = spaces.describe(self.environment.observation_space, observation)
        if self.environment.render_mode == "ansi":
            text = HIGHLIGHT.sub(r"[\1]", str(self.environment.render()))
            drawing = COLOUR.sub("", text).strip("\n")
            return [*parts, {"type": "text", "text": drawing}]
        if self.environment.render_mode == "rgb_array":
            frame = self.environment.render()
            return [*parts, *spaces.image_parts(frame)]
        return parts

    def _read_text(self, text: str) -> Any:
        """The action in the last line of a turn: a name, or JSON; for spaces of text, the turn itself."""
        if type(self.environment.action_space).__name__ == "Text":
            return text.strip()
        line = text.strip().rpartition("\n")[2].strip().strip("`").strip()
        if line in self.names:
            return line
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(line)
        known = f"write one of {', '.join(self.names)}" if self.names else "write it as JSON"
        raise ValueError(f"{line[:80]!r}; {known}, alone in the last line")
