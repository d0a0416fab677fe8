"""The run file's settings for agents: what plays a rollout, with what environment, and what its failures mean."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from gateway.config.base import FrozenModel


class AgentSettings(FrozenModel):
    """An agent that exists already: a program, a Python function, or whoever opens sessions over HTTP.

    It talks to the policy through an endpoint with the protocols of OpenAI and Anthropic.
    """

    command: str | tuple[str, ...] | None = None
    """A program, started for each rollout, as a list of words or as one line; never run by a shell. `{prompt}`,
    `{base_url}`, `{anthropic_base_url}`, `{api_key}`, `{model}`, `{mcp_url}`, `{folder}` (where it works) and
    `{task_file}` in a word are replaced."""
    function: str | None = None
    """`module:name` or `my_agent.py:run`: an async function that is called with the base URL, the task and the
    session. It may return the reward."""
    external: bool = False
    """Programs elsewhere open sessions by `POST /sessions`, play them, and post the reward."""
    env: dict[str, str] = {}
    """Further environment variables of the program; the same words are replaced. It gets `OPENAI_BASE_URL`,
    `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY` and `MTRL_MCP_URL`, and of ours only `PATH`, `HOME`,
    `LANG` and `TZ`."""
    inherit_env: tuple[str, ...] = ()
    """Names of our own environment variables that the program gets, too."""
    cwd: Path | None = None
    """A folder of which each rollout gets a copy to work in; by default an empty one. It is removed at the end."""
    files: dict[str, str] = {}
    """Further files of that folder, by their path in it, such as a configuration that names the endpoint; the same
    words are replaced."""
    stdin: Literal["prompt", "json", "none"] = "prompt"
    """What the program reads: the last question as text, the task as JSON, or nothing."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""
    on_failure: Literal["lost", "scored"] = "lost"
    """What a program that fails after it was served, or a function that raises, means: the rollout is lost to
    infrastructure, or it is scored like any other."""
    stop_s: PositiveFloat = 5.0
    """Seconds that an agent has to end by itself once the policy writes nothing more, and a program after SIGTERM."""
    open_s: PositiveFloat = 600.0
    """With `external`, seconds without a program that opens a session, after which rollouts that wait are lost."""
    idle_s: PositiveFloat = 3600.0
    """With `external`, seconds without a request after which a session is ended: its program died, or forgot it. A
    generation or a tool call that is under way counts as a request."""
    address_file: Path | None = None
    """With `external`, a file for programs with the address of the endpoint and the run's key, as JSON that only this
    user may read; it is removed at the end. By default they are printed."""
    host: str = "127.0.0.1"
    """Where the endpoint listens. Other machines reach it only at another address."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """The endpoint's port; by default a free one."""
    public_url: str | None = None
    """The endpoint's address as agents reach it, if it is not the one where it listens, as behind a proxy."""
    sampling: Literal["run", "request"] = "run"
    """Whose temperature and top-p count: the run's, which training assumes, or the request's."""
    output_chars: NonNegativeInt = 20_000
    """The most characters of a program's output that are kept: the end of it."""

    @property
    def description(self) -> str:
        """Who plays, in words."""
        if self.function is not None:
            return f"an agent plays the rollouts: the function {self.function}"
        if self.command is not None:
            words = self.command if isinstance(self.command, str) else " ".join(self.command)
            return f"an agent plays the rollouts: the program {words}"
        return "agents play the rollouts: programs that open sessions over HTTP"

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = [name for name in ("command", "function", "external") if getattr(self, name)]
        if len(given) != 1:
            names = " and ".join(given) or "none"
            raise ValueError(f"give one of `command`, `function` and `external: true`, not {names}")
        for name in ("env", "cwd", "files", "inherit_env"):
            if getattr(self, name) and not self.command:
                raise ValueError(f"`{name}` is for a `command`")
        for path in map(PurePosixPath, self.files):
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"`files`: '{path}' is no path inside the folder")
        if self.args and not self.function:
            raise ValueError("`args` are for a `function`")
        return self
