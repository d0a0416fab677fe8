"""Reads the content of messages as protocols write it: text, parts of text, and images as data URIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.media.sniff import MediaError, media_from_data_uri
from gateway.types import Image
from mtrl_plugins.agents.policy_request import PolicyProblem, refuse, require

Content = str | list[dict[str, Any]]
_TEXT_TYPES = frozenset({"text", "input_text", "output_text", "summary_text", "refusal"})
_IMAGE_TYPES = frozenset({"image_url", "input_image"})


def read_content(content: Any, where: str) -> Content:
    """The content for a template; parts of text alone become one text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    require(isinstance(content, list), "must be text or a list of parts", where)
    parts = [read_part(part, f"{where}.{index}") for index, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def read_part(part: Any, where: str) -> dict[str, Any]:
    """One part of a message."""
    require(isinstance(part, Mapping), "must be an object", where)
    kind = part.get("type")
    if kind in _TEXT_TYPES:
        text = part.get("text", part.get("refusal"))
        require(isinstance(text, str), "needs a text", where)
        return {"type": "text", "text": text}
    refuse(kind not in _IMAGE_TYPES, f"parts of type {kind!r} are not supported", where)
    url = part.get("image_url")
    return make_image(url.get("url") if isinstance(url, Mapping) else url, where)


def make_image(uri: Any, where: str) -> dict[str, Any]:
    """An image from a data URI. Nothing is fetched: an address could be one of this machine."""
    refuse(
        not (isinstance(uri, str) and uri.startswith("data:")),
        "images must be data URIs (`data:image/png;base64,...`): addresses are not fetched",
        where,
    )
    try:
        image = media_from_data_uri(uri)
    except (MediaError, ValueError) as error:
        raise PolicyProblem("invalid_request", f"is no image: {error}", param=where) from error
    require(isinstance(image, Image), "is no image", where)
    return {"type": "image", "image": image}
