"""Models of servers and limits. Field descriptions appear in the JSON Schemas that editors use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    model_validator,
)

from gateway.config.base import FrozenModel, rule_error
from gateway.config.server_auth import Answers, OAuth
from gateway.sandbox.sandbox_settings import SandboxSettings, check_environment, check_is_local

Isolation = Literal["shared", "session", "process", "sandbox"]
OnClash = Literal["prefix", "refuse", "first"]
ProtocolChoice = Literal["auto", "2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"]
Instructions = Literal["system", "none"]
Side = Literal["left", "middle", "right"]


class ResultLimit(FrozenModel):
    """Maximum length of a result. Removed text is replaced by a marker and counted in the metrics."""

    chars: PositiveInt | None = None
    """At most this many characters of text."""
    tokens: PositiveInt | None = None
    """At most this many tokens of `tokenizer`."""
    tokenizer: str | None = None
    """Path of a `tokenizer.json`, or of a model folder with one."""
    side: Side = "middle"
    """The side that is removed."""

    @model_validator(mode="after")
    def _one_measure(self) -> ResultLimit:
        if (self.chars is None) == (self.tokens is None):
            raise rule_error("a limit is either in `chars` or in `tokens`", "give exactly one of the two")
        if (self.tokens is None) != (self.tokenizer is None):
            raise rule_error("a limit in `tokens` and a `tokenizer` go together", "give both, or limit by `chars`")
        return self


class MediaLimits(FrozenModel):
    """Limits on images, audio and video for the policy; a note in the text replaces what is left out."""

    most_images: NonNegativeInt = 16
    """Maximum number of images in one result; further ones are left out."""
    most_bytes: PositiveInt = 32 * 1024 * 1024
    """Maximum size; a larger image, audio, video or document is left out."""
    most_pixels: Annotated[int, Field(gt=0, le=89_478_485)] = 64_000_000
    """A larger image is left out before it is decoded, and so is a video whose frames together have more pixels."""
    min_pixels: PositiveInt | None = None
    """A smaller image or video frame is enlarged to this number of pixels."""
    max_pixels: PositiveInt | None = None
    """A larger image or video frame is reduced to this number of pixels."""
    factor: PositiveInt = 28
    """Sides of resized images become multiples of this: 28 for Qwen2-VL and Qwen2.5-VL, 32 for Qwen3-VL."""
    animated: Literal["first", "frames", "video"] = "first"
    """How to show an animated GIF, WebP or PNG: its first frame, several frames, or as a video."""
    videos: Literal["video", "frames"] = "video"
    """How to show a video: as a video, or as several frames."""
    fps: PositiveFloat = 2.0
    """Frames sampled per second of a video; at least one frame in all."""
    max_frames: PositiveInt = 16
    """Maximum number of frames of one video."""

    @model_validator(mode="after")
    def _check_pixel_limits(self) -> MediaLimits:
        if self.min_pixels is not None and self.min_pixels > (self.max_pixels or self.min_pixels):
            raise rule_error("`min_pixels` is more than `max_pixels`", "make it the smaller of the two")
        if self.max_pixels is not None and self.max_pixels < self.factor**2:
            raise rule_error(
                "`max_pixels` is less than the square of `factor`", "give more pixels, or a smaller factor"
            )
        return self


def _number_to_chars(value: Any) -> Any:
    """Interprets a bare number as characters."""
    is_number = isinstance(value, int | str) and not isinstance(value, bool)
    return {"chars": value} if is_number else value


class Limits(FrozenModel):
    """Limits for each tool of one entry."""

    timeout_s: PositiveFloat = 60.0
    """Deadline of one call, including retries and the time in the queue."""
    at_once: PositiveInt = 64
    """Maximum number of concurrent calls of one tool."""
    queue_limit: Annotated[int, Field(ge=0)] = 4096
    """Maximum number of waiting calls of one tool; further ones are refused at once."""
    rate_per_s: PositiveFloat | None = None
    """Maximum number of calls of one tool that start per second."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Retries of a call that was never delivered, or that is declared safe to repeat."""
    result_limit: Annotated[
        ResultLimit | None, BeforeValidator(_number_to_chars, json_schema_input_type=ResultLimit | PositiveInt | None)
    ] = None
    """Maximum length of a result; a number means characters."""
    media: MediaLimits = MediaLimits()
    """Limits on images, audio and video in results."""
    pure: bool = False
    """The same arguments always give the same result, and no session is needed."""


def _normalize_transport(value: Any) -> Any:
    """Accepts other clients' names for streamable HTTP."""
    return "streamable-http" if value in ("http", "streamableHttp", "streamable_http") else value


Transport = Annotated[
    Literal["stdio", "sse", "streamable-http"],
    BeforeValidator(
        _normalize_transport,
        json_schema_input_type=Literal["stdio", "sse", "streamable-http", "http", "streamableHttp", "streamable_http"],
    ),
]


def _check_header_value(value: SecretStr) -> SecretStr:
    """Checks header values here, because an HTTP library's error message would quote the secret."""
    text = value.get_secret_value()
    if not text.isascii() or not text.isprintable() or text != text.strip():
        problem = "contains characters that an HTTP header cannot have"
        raise rule_error(problem, "remove line breaks, surrounding spaces and non-ASCII characters")
    return value


HeaderSecret = Annotated[SecretStr, AfterValidator(_check_header_value)]


_COMMAND_FIELDS = ("args", "env", "cwd", "state", "states", "state_ignore", "keep_state")
_FIELDS_OF_URLS = (
    "proxy",
    "ca_file",
    "cert_file",
    "key_file",
    "headers",
    "auth_token",
    "auth_command",
    "auth_refresh_s",
    "oauth",
    "start",
)


class Server(FrozenModel):
    """An MCP server: started as a child process (`command`) or reached over HTTP (`url`)."""

    command: str | None = None
    """Program to start; it speaks MCP on its standard input and output."""
    args: tuple[str, ...] = ()
    """Arguments of the program. With `isolation: process` or `sandbox`, here and in `command`, `env` and `cwd`,
    `${MTRL_ROLLOUT_DIR}` is a folder of the rollout, `${MTRL_ROLLOUT_ID}` its name and `${MTRL_SEED}` its task's."""
    env: dict[str, str] = {}
    """Environment variables, in addition to the safe ones that every child gets (PATH, HOME, ...)."""
    cwd: Path | None = None
    """Working folder of the program, relative to the file."""
    state: Path | None = None
    """Folder or archive (tar, zip) that each rollout's `${MTRL_ROLLOUT_DIR}` begins as a copy of."""
    states: Path | None = None
    """Folder of such folders and archives: a task's `state` names the one that it begins from instead."""
    state_ignore: tuple[str, ...] = ()
    """Patterns of files that do not count when the state at a rollout's end is compared, such as `*.log`."""
    keep_state: Path | None = None
    """Folder in which the folders of rollouts are kept under the rollouts' names; by default they are removed."""
    url: str | None = None
    """Address of a running server."""
    transport: Transport | None = None
    """Transport; by default, a `url` is tried as streamable HTTP first, then as SSE."""
    headers: dict[str, HeaderSecret] = {}
    """HTTP headers of every request."""
    auth_token: HeaderSecret | None = None
    """Sent as `Authorization: Bearer ...`."""
    proxy: SecretStr | None = None
    """HTTP proxy in front of `url`, such as `http://user:password@proxy.example:3128`."""
    ca_file: Path | None = None
    """PEM file of a private authority, trusted beside the system's."""
    cert_file: Path | None = None
    """PEM file of the client's certificate, and its key or `key_file`."""
    key_file: Path | None = None
    """PEM file of that key."""
    protocol: ProtocolChoice = "auto"
    """MCP version to speak. `auto`: 2026-07-28 if the server supports it, unless it announces changes of its tools or
    asks for input (elicitation) only in an older version; else its latest."""
    instructions: Instructions = "none"
    """`system`: what the server says about itself goes before the policy's first message, as a system prompt."""
    auth_command: tuple[str, ...] = ()
    """Program and arguments that print the token, or a JSON object of headers; run again when the server rejects it."""
    auth_refresh_s: PositiveFloat | None = None
    """Time after which `auth_command` runs again; by default, only when the server rejects what it printed."""
    oauth: OAuth | None = None
    """How to get OAuth tokens; without it, a server that asks for a login gets one by `mtrl-gateway login`."""
    answers: Answers | None = None
    """Answers to the server's questions when the caller cannot answer; by default, such calls end as an error."""
    isolation: Isolation = "shared"
    """`shared`: one connection for all; `session`: an MCP session per rollout; `process`: a child per rollout;
    `sandbox`: a child per rollout, in a sandbox."""
    sandbox: SandboxSettings = SandboxSettings()
    """With `isolation: sandbox`: what exists inside besides the program, the files that its arguments name, and `cwd`,
    and the limits."""
    warm: Annotated[int, Field(ge=0)] = 0
    """Idle connections kept ready, in addition to those in use (`session`, `process`)."""
    most: PositiveInt = 16
    """Maximum number of connections (child processes with `process`); further rollouts wait."""
    idle_s: PositiveFloat = 300.0
    """Time after which an idle connection is closed."""
    connect_timeout_s: PositiveFloat = 30.0
    """Deadline for starting, the handshake and listing the tools."""
    ping_s: PositiveFloat = 30.0
    """An idle server is pinged after this much silence."""
    ping_timeout_s: PositiveFloat = 5.0
    """Deadline of a ping, which is also sent when a call times out. A server that does not answer, and has no call
    under way that still has time, is restarted (`command`) or connected to again (`url`)."""
    timeouts_in_a_row: PositiveInt = 5
    """After this many calls in a row that time out, the same happens to a server that still answers pings."""
    result_values: PositiveInt = 100_000
    """Maximum number of objects, lists and scalars in one answer. Reading 100,000 holds all others up for 10 ms."""
    result_bytes: PositiveInt = 16 * 1024 * 1024
    """Maximum size of one response of the server."""
    on_clash: OnClash = "prefix"
    """What happens to a tool of this server whose name a native tool or a server further up in the file has: `prefix`
    offers it as `server_tool`, `refuse` is an error at the start, `first` leaves it out."""
    resources: Literal["none", "tools"] = "none"
    """`tools`: the policy can list and read the server's resources, with tools named after the server."""
    prompts: Literal["none", "tools"] = "none"
    """`tools`: the policy can list and get the server's prompts."""
    optional: bool = False
    """The gateway works without it: if it is down, `mtrl-gateway check` prints a note instead of an error."""
    start: str | None = None
    """Command to start a server with `url`, shown to the operator if the server does not answer."""

    @property
    def requested_transport(self) -> str | None:
        """The transport that the file requests."""
        return self.transport

    @model_validator(mode="after")
    def _check_transport(self) -> Server:
        if (self.command is None) == (self.url is None):
            raise rule_error("a server needs either `command` or `url`", "give exactly one of the two")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise rule_error("`url` is not an HTTP address", "begin it with http:// or https://")
        if self.proxy is not None and not self.proxy.get_secret_value().startswith(("http://", "https://")):
            raise rule_error("`proxy` is not the address of an HTTP proxy", "begin it with http:// or https://")
        if self.key_file is not None and self.cert_file is None:
            raise rule_error("`key_file` is the key of a `cert_file`", "give both, or remove `key_file`")
        misplaced_fields = _COMMAND_FIELDS if self.command is None else _FIELDS_OF_URLS
        if misplaced := [name for name in misplaced_fields if getattr(self, name)]:
            owner = "command" if self.command is None else "url"
            raise rule_error(
                f"`{misplaced[0]}` belongs to a server with `{owner}`", f"remove `{misplaced[0]}`, or give `{owner}`"
            )
        if self.requested_transport is not None and (self.requested_transport == "stdio") == (self.command is None):
            raise rule_error(
                f"`{self.requested_transport}` cannot reach this server",
                "stdio goes with `command`, the others with `url`",
            )
        if self.isolation in ("process", "sandbox") and self.command is None:
            raise rule_error(f"`isolation: {self.isolation}` needs a server with `command`", "use `session`")
        if "sandbox" in self.model_fields_set and self.isolation != "sandbox":
            raise rule_error("`sandbox` belongs to `isolation: sandbox`", "write `isolation: sandbox`, or remove it")
        check_is_local(self.sandbox)
        if self.isolation == "sandbox":
            check_environment(self.env)
        return self

    @model_validator(mode="after")
    def _check_credentials(self) -> Server:
        ways = [name for name in ("auth_token", "auth_command", "oauth") if getattr(self, name)]
        if len(ways) > 1:
            raise rule_error(f"`{ways[0]}` and `{ways[1]}` exclude each other", "keep one of them")
        if ways and any(name.lower() == "authorization" for name in self.headers):
            raise rule_error(f"the `Authorization` header and `{ways[0]}` exclude each other", "keep one of them")
        if self.auth_refresh_s is not None and not self.auth_command:
            raise rule_error("`auth_refresh_s` belongs to `auth_command`", "remove it, or give `auth_command`")
        return self
