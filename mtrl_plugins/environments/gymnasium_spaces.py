"""Gymnasium's spaces: the JSON schema of an action, the action in a JSON value, and an observation as text and images.

Runs in the host process, with the Python that has `gymnasium` and `numpy`.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

numpy: Any = importlib.import_module("numpy") if not __name__.startswith("mtrl_plugins.") else None
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
