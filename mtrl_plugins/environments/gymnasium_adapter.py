"""The adapter of Gymnasium in a host process: an environment's steps as calls of a tool, its observations as text.

Runs with the Python that has `gymnasium` and `numpy`. Its first half is about spaces: the JSON schema of an action, the
action in a JSON value, and an observation as text and images.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import re
import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtrl_plugins.environments.host_server import HostError, import_framework
else:
    from host_server import HostError, import_framework

numpy: Any = importlib.import_module("numpy")
MAX_NUMBERS = 4096
"""Numbers of one array that are written out; of a longer one, only its shape."""
MIN_IMAGE_SIDE, MIN_GREY_SIDE = 8, 32
"""Sides of pictures; a smaller array without channels is a board."""


def action_schema(space: Any, names: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON schema of a space's values. Raises ValueError for spaces that JSON cannot express."""
    kind = type(space).__name__
    if kind not in SCHEMAS:
        raise ValueError(f"a {kind} space cannot be the arguments of a tool")
    if names and kind == "Discrete":
        return {"type": "string", "enum": list(names)}
    schema: dict[str, Any] = SCHEMAS[kind](space)
    return schema


def _discrete(space: Any) -> dict[str, Any]:
    start = int(space.start)
    return {"type": "integer", "minimum": start, "maximum": start + int(space.n) - 1}


def _box(space: Any) -> dict[str, Any]:
    kind = "integer" if numpy.issubdtype(space.dtype, numpy.integer) else "number"
    number: dict[str, Any] = {"type": kind}
    if space.low.size:
        low, high = space.low.min().item(), space.high.max().item()
        number |= {"minimum": low} if math.isfinite(low) else {}
        number |= {"maximum": high} if math.isfinite(high) else {}
    return _nested(number, space.shape)


def _nested(item: dict[str, Any], shape: Sequence[int]) -> dict[str, Any]:
    """Arrays in arrays, each with its length."""
    for length in reversed(shape):
        item = {"type": "array", "items": item, "minItems": int(length), "maxItems": int(length)}
    return item


def _multi_discrete(space: Any) -> dict[str, Any]:
    if space.nvec.ndim != 1:
        return _nested({"type": "integer"}, space.nvec.shape)
    starts = numpy.broadcast_to(getattr(space, "start", 0), space.nvec.shape)
    return _tuple_of(
        [
            {"type": "integer", "minimum": int(start), "maximum": int(start) + int(count) - 1}
            for start, count in zip(starts, space.nvec)  # noqa: B905 - other Pythons run this
        ]
    )


def _tuple_of(items: list[dict[str, Any]]) -> dict[str, Any]:
    """An array with an item for each schema."""
    length = {"minItems": len(items), "maxItems": len(items)}
    if items and all(item == items[0] for item in items):
        return {"type": "array", "items": items[0], **length}
    return {"type": "array", "prefixItems": items, **length}


def _text(space: Any) -> dict[str, Any]:
    characters = "".join(re.escape(each) for each in sorted(space.characters))
    length = {"minLength": int(space.min_length), "maxLength": int(space.max_length)}
    return {"type": "string", **length, "pattern": f"^[{characters}]*$"}


def _dict(space: Any) -> dict[str, Any]:
    properties = {str(name): action_schema(inner) for name, inner in space.spaces.items()}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _one_of(space: Any) -> dict[str, Any]:
    pairs = [_tuple_of([{"const": number}, action_schema(inner)]) for number, inner in enumerate(space.spaces)]
    return {"anyOf": pairs}


SCHEMAS: Mapping[str, Any] = {
    "Discrete": _discrete,
    "Box": _box,
    "MultiDiscrete": _multi_discrete,
    "MultiBinary": lambda space: _nested({"type": "integer", "minimum": 0, "maximum": 1}, space.shape),
    "Text": _text,
    "Dict": _dict,
    "Tuple": lambda space: _tuple_of([action_schema(inner) for inner in space.spaces]),
    "Sequence": lambda space: {"type": "array", "items": action_schema(space.feature_space), "maxItems": 256},
    "OneOf": _one_of,
}


def read_action(space: Any, value: Any, names: Sequence[str] = ()) -> Any:
    """The space's value that a JSON value means. Raises ValueError if it is not in the space."""
    kind = type(space).__name__
    if names and kind == "Discrete" and value in names:
        return numpy.int64(space.start + list(names).index(value))
    action = _decode(space, kind, value)
    if not space.contains(action):
        allowed = f"one of {', '.join(names)}" if names else json.dumps(action_schema(space))
        raise ValueError(f"{json.dumps(value)[:200]} is not {allowed[:400]}")
    return action


def _decode(space: Any, kind: str, value: Any) -> Any:
    if kind == "Discrete":
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise ValueError(f"{json.dumps(value)[:200]} is not a whole number")
        return numpy.int64(value)
    if kind in ("Box", "MultiDiscrete", "MultiBinary"):
        array = numpy.asarray(value)
        if array.dtype.kind not in "iuf" or (array.dtype.kind == "f" and space.dtype.kind != "f"):
            raise ValueError(f"{json.dumps(value)[:200]} does not consist of the right numbers")
        return array.astype(space.dtype)
    if kind == "Dict":
        return {name: read_action(inner, value[name]) for name, inner in space.spaces.items()}
    if kind == "Tuple":
        if len(value) != len(space.spaces):
            raise ValueError(f"has {len(value)} items instead of {len(space.spaces)}")
        return tuple(read_action(inner, item) for inner, item in zip(space.spaces, value))  # noqa: B905
    if kind == "Sequence":
        items = tuple(read_action(space.feature_space, item) for item in value)
        return numpy.stack(items) if getattr(space, "stack", False) and items else items
    if kind == "OneOf":
        number, inner = value
        return numpy.int64(number), read_action(space.spaces[number], inner)
    return value


def describe(space: Any, observation: Any) -> list[dict[str, Any]]:
    """An observation as parts: a text, and the images in it."""
    if _is_image(observation):
        return image_parts(observation)
    images: list[dict[str, Any]] = []
    plain = _plain(observation, images)
    text = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
    return [{"type": "text", "text": text}, *images]


def _plain(value: Any, images: list[dict[str, Any]]) -> Any:
    """A value as JSON has it; images in it become parts."""
    if _is_image(value):
        images.extend(image_parts(value))
        return f"(image {len(images)})"
    if isinstance(value, numpy.ndarray):
        if value.size > MAX_NUMBERS:
            return f"(an array of the shape {list(value.shape)})"
        return _plain(value.tolist(), images)
    if isinstance(value, numpy.generic):
        return _plain(value.item(), images)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, images) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, images) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, str | int | bool | type(None)) else str(value)


def _is_image(value: Any) -> bool:
    """Whether an array is a picture: bytes with one, three or four channels, or many without channels."""
    if not isinstance(value, numpy.ndarray) or value.dtype != numpy.uint8:
        return False
    if value.ndim == 2:
        return bool(min(value.shape) >= MIN_GREY_SIDE)
    return value.ndim == 3 and value.shape[2] in (1, 3, 4) and bool(min(value.shape[:2]) >= MIN_IMAGE_SIDE)


def image_parts(pixels: Any) -> list[dict[str, Any]]:
    """A frame, or several, as PNG."""
    if isinstance(pixels, list | tuple):
        return [part for frame in pixels for part in image_parts(frame)]
    if pixels is None:
        return []
    return [{"type": "image", "mime": "image/png", "data": b64encode(encode_png(numpy.asarray(pixels))).decode()}]


def encode_png(pixels: Any) -> bytes:
    """Pixels as a PNG file, with the standard library alone."""
    height, width, channels = (*pixels.shape, 1)[:3]
    colours = {1: 0, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.tobytes() for row in numpy.ascontiguousarray(pixels, dtype=numpy.uint8))
    header = struct.pack(">IIBBBBB", width, height, 8, colours, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


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
            schema = action_schema(probe.action_space, self.names)
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
            remedy = "correct the name, or `environment.args`, or install what it needs (`-m pip install`)"
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
            return read_action(self.environment.action_space, value, self.names)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise ActionError(str(error)) from error

    def close(self) -> None:
        """Releases what the environment holds."""
        self.environment.close()

    def _describe(self, observation: Any) -> list[dict[str, Any]]:
        """The observation, and what the environment renders as text or as an image."""
        parts: list[dict[str, Any]] = describe(self.environment.observation_space, observation)
        if self.environment.render_mode == "ansi":
            text = HIGHLIGHT.sub(r"[\1]", str(self.environment.render()))
            drawing = COLOUR.sub("", text).strip("\n")
            return [*parts, {"type": "text", "text": drawing}]
        if self.environment.render_mode == "rgb_array":
            frame = self.environment.render()
            return [*parts, *image_parts(frame)]
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
