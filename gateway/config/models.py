"""The configuration as it is meant: frozen, complete, nothing unknown let through.

Field descriptions are the documentation: the JSON Schema that editors read is made from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    model_validator,
)
from pydantic_core import PydanticCustomError

Isolation = Literal["shared", "session", "process"]
Side = Literal["left", "middle", "right"]
SHOWN = (bool, int, float, BaseModel, type(None))


class Frozen(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        # Every wait has a deadline, and infinity is none.
        allow_inf_nan=False,
        hide_input_in_errors=True,
        validate_by_name=True,
        validate_by_alias=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _absent(cls, data: Any) -> Any:
        """A known key with nothing behind it (`tool_schema:`) is a key left out."""
        if not isinstance(data, dict):
            return data
        known = keys(cls)
        return {key: value for key, value in data.items() if value is not None or key not in known}

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        # Any text may have come from the environment, so that none of it is shown.
        given = ((name, getattr(self, name)) for name in type(self).model_fields if name in self.model_fields_set)
        return [(name, value) for name, value in given if isinstance(value, SHOWN)]


def keys(model: type[BaseModel]) -> dict[str, str]:
    """What a file may write -> the field that it sets."""
    return {field.alias or name: name for name, field in model.model_fields.items()}


def mistake(problem: str, remedy: str) -> PydanticCustomError:
    """A rule is broken; the text quotes nothing that a file holds."""
    return PydanticCustomError("rule", "{problem}", {"problem": problem, "remedy": remedy})


class ResultLimit(Frozen):
    """How much of a result the policy reads. What is cut is marked in the text and counted."""

    chars: PositiveInt | None = None
    """At most this many characters of text."""
    tokens: PositiveInt | None = None
    """At most this many tokens of `tokenizer`."""
    tokenizer: str | None = None
    """A tokenizer's folder or file, as `tokenizers.Tokenizer.from_file` or a model folder gives it."""
    side: Side = "middle"
    """The side that is cut away."""

    @model_validator(mode="after")
    def _one_measure(self) -> ResultLimit:
        if (self.chars is None) == (self.tokens is None):
            raise mistake("a limit is in `chars` or in `tokens`", "give exactly one of the two")
        if (self.tokens is None) != (self.tokenizer is None):
            raise mistake("a limit in `tokens` and a `tokenizer` go together", "give both, or limit by `chars`")
        return self


class MediaLimits(Frozen):
    """What the policy is shown of pictures, sounds and films; of what it is not shown, the text tells."""

    most_images: NonNegativeInt = 16
    """Pictures of one result, those after them are left out; and of one film, evenly spread."""
    most_bytes: PositiveInt = 32 * 1024 * 1024
    """A larger picture, sound, film or document is left out."""
    most_pixels: Annotated[int, Field(gt=0, le=89_478_485)] = 64_000_000
    """A larger picture is left out, before it is decoded; a film too, whose frames have more pixels together."""
    min_pixels: PositiveInt | None = None
    """A smaller picture, or frame of a film, is enlarged to as many pixels."""
    max_pixels: PositiveInt | None = None
    """A larger picture, or frame of a film, is shrunk to as many pixels."""
    factor: PositiveInt = 28
    """Sides of a picture that is resized become multiples of this: 28 for Qwen2-VL and 2.5-VL, 32 for Qwen3-VL."""
    animated: Literal["first", "frames", "film"] = "first"
    """What an animated GIF, WebP or PNG becomes: the picture that it begins with, several pictures, or a film."""
    films: Literal["film", "frames"] = "film"
    """What a film becomes: it stays one, or several pictures are shown of it."""
    fps: PositiveFloat = 2.0
    """Of each second of a film that is looked at, so many pictures, and at least one."""
    max_frames: PositiveInt = 16
    """Pictures of one film, at the most."""

    @model_validator(mode="after")
    def _in_order(self) -> MediaLimits:
        if self.min_pixels is not None and self.min_pixels > (self.max_pixels or self.min_pixels):
            raise mistake("`min_pixels` is more than `max_pixels`", "make it the smaller of the two")
        if self.max_pixels is not None and self.max_pixels < self.factor**2:
            raise mistake("`max_pixels` is less than a square of `factor`", "give more pixels, or a smaller factor")
        return self


def _chars(value: Any) -> Any:
    """A bare number is characters."""
    counts = isinstance(value, int | str) and not isinstance(value, bool)
    return {"chars": value} if counts else value


class Limits(Frozen):
    """Patience and its ends, for every tool of one entry."""

    timeout_s: PositiveFloat = 60.0
    """Deadline of one call, all attempts and the wait for a place included."""
    at_once: PositiveInt = 64
    """Calls of one tool that may run at the same time."""
    queue_limit: Annotated[int, Field(ge=0)] = 4096
    """Calls of one tool that may wait for a place; one more is refused at once."""
    rate_per_s: PositiveFloat | None = None
    """Calls of one tool that may start per second."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Further attempts at a call which was never delivered, or which is declared safe to repeat."""
    result_limit: Annotated[
        ResultLimit | None, BeforeValidator(_chars, json_schema_input_type=ResultLimit | PositiveInt | None)
    ] = None
    """How much of a result the policy reads; a number is characters."""
    media: MediaLimits = MediaLimits()
    """What the policy is shown of a result's pictures, sounds and films."""
    pure: bool = False
    """The same arguments always give the same answer, and no session is needed."""


def _transport(value: Any) -> Any:
    """Other clients write these; they mean the same."""
    return "streamable-http" if value in ("http", "streamableHttp", "streamable_http") else value


Transport = Annotated[
    Literal["stdio", "sse", "streamable-http"],
    BeforeValidator(
        _transport,
        json_schema_input_type=Literal["stdio", "sse", "streamable-http", "http", "streamableHttp", "streamable_http"],
    ),
]


def _sendable(value: SecretStr) -> SecretStr:
    """What a header cannot carry is found here, since the refusal of an HTTP library quotes it."""
    text = value.get_secret_value()
    if not text.isascii() or not text.isprintable() or text != text.strip():
        problem = "holds what no HTTP header can carry"
        raise mistake(problem, "remove line ends, spaces around it, and all that is not ASCII")
    return value


HeaderSecret = Annotated[SecretStr, AfterValidator(_sendable)]


class Server(Frozen):
    """One MCP server of `mcp_servers.json`: started here (`command`), or reached (`url`)."""

    command: str | None = None
    """The program to start; it speaks MCP over its standard input and output."""
    args: tuple[str, ...] = ()
    """Its arguments."""
    env: dict[str, str] = {}
    """Environment variables beside the safe ones every child gets (PATH, HOME, ...)."""
    cwd: Path | None = None
    """Its working folder; a relative one is seen from the file."""
    url: str | None = None
    """Where a running server listens."""
    transport: Transport | None = None
    """How to speak; a bare `url` is tried as streamable HTTP first, then as SSE."""
    headers: dict[str, HeaderSecret] = {}
    """HTTP headers for every request."""
    auth_token: HeaderSecret | None = None
    """Sent as `Authorization: Bearer ...`."""
    isolation: Isolation = "shared"
    """`shared`: one connection for all; `session`: an MCP session per rollout; `process`: a child per rollout."""
    warm: Annotated[int, Field(ge=0)] = 0
    """Connections kept ready beyond those in use (`session`, `process`)."""
    most: PositiveInt = 16
    """Connections (children, for `process`) at the most; further rollouts wait."""
    idle_s: PositiveFloat = 300.0
    """A ready connection unused for this long is closed."""
    connect_timeout_s: PositiveFloat = 30.0
    """Starting, shaking hands and listing the tools must be done by then."""
    result_bytes: PositiveInt = 16 * 1024 * 1024
    """A larger answer of this server is refused."""
    optional: bool = False
    """Others go on without it: that it is down is worth a note, and no mistake."""
    start: str | None = None
    """How a person starts a server that is reached; told where it does not answer."""

    @property
    def way(self) -> str | None:
        """The transport that the file asks for, in whatever words."""
        return self.transport

    @model_validator(mode="after")
    def _one_way(self) -> Server:
        if (self.command is None) == (self.url is None):
            raise mistake("a server is started with `command` or reached at a `url`", "give exactly one of the two")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise mistake("`url` is no HTTP address", "begin it with http:// or https://")
        ours = ("args", "env", "cwd") if self.command is None else ("headers", "auth_token", "start")
        if odd := [name for name in ours if getattr(self, name)]:
            owner = "command" if self.command is None else "url"
            raise mistake(f"`{odd[0]}` belongs to a server with `{owner}`", f"remove `{odd[0]}`, or give `{owner}`")
        if self.way is not None and (self.way == "stdio") == (self.command is None):
            raise mistake(f"`{self.way}` cannot reach this server", "stdio goes with `command`, the others with `url`")
        if self.isolation == "process" and self.command is None:
            raise mistake("`isolation: process` starts children, and this server is reached", "use `session`")
        return self
